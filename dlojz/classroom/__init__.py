"""The facts that trainees share with their class, if they want to, and the instructor's view.

`share` keeps a trainee's consent and writes one small file, in the format of `summary`; `members`
reads a folder of such files and trusts none of them; `standing` computes what a board shows.
"""

from dlojz.classroom import share
from dlojz.course import progress

progress.listeners.append(share.publish)
