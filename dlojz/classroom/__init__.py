"""The facts that trainees share with their class, if they want to, and the instructor's view.

`share` keeps a trainee's consent and writes one small file, in the format of `summary`; `members`
reads a folder of such files and trusts none of them; `standing` computes what a board shows.
"""

from dlojz.classroom.members import Classroom, Member, read
from dlojz.classroom.share import (
    Consent,
    begin,
    consent_of,
    dangers,
    plan,
    preview,
    publish,
    readers,
    stop,
)
from dlojz.course import progress

__all__ = [
    "Classroom",
    "Consent",
    "Member",
    "begin",
    "consent_of",
    "dangers",
    "plan",
    "preview",
    "publish",
    "read",
    "readers",
    "stop",
]

progress.listeners.append(publish)
