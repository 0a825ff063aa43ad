"""Print the link that brings the course to a trainee's home, and its updates later.

link.py HUB REPOSITORY [BRANCH], such as link.py https://hub.example.org https://...git main
"""

import sys
from urllib.parse import quote, urlencode


def link(hub: str, repository: str, branch: str = "main", notebook: str = "00_start") -> str:
    """Return the link: it starts the trainee's server, pulls, and opens a notebook."""
    options = {
        "repo": repository,
        "branch": branch,
        "targetpath": "dlojz",  # the folder in the home, whatever the repository's name
        "urlpath": f"lab/tree/dlojz/notebooks/{notebook}.ipynb",
    }
    return f"{hub.rstrip('/')}/hub/user-redirect/git-pull?{urlencode(options, quote_via=quote)}"


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1].startswith("-"):
        asked = sys.argv[1:] in (["-h"], ["--help"])
        print(__doc__) if asked else sys.exit(f"expected a hub and a repository.\n{__doc__}")
    else:
        print(link(*sys.argv[1:]))
