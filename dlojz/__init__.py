"""DLO-JZ: a workshop on making PyTorch training fast. The trainer is `dlojz/dlojz.py`."""
