"""The command `dlojz`, where it is not on the path: `python -m dlojz.cli`."""

from dlojz.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
