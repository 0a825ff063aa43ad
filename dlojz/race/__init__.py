"""The race: the best accuracy within a budget of seconds and of joules, judged by running it again.

    from dlojz import race
    mine = race.new("races/mine", seconds=20)
    race.enter(mine, "starter", "dlojz/dlojz.py --model resnet18 --image-size 64 -e 3")
    race.run(mine)                      # rounds, until no entry waits
    race.board(mine)

A race is a folder: `race.toml` (the rules), `entries/` (snapshots) and `results.jsonl`, to which an
organiser only appends. docs/race.md has the rules for people.
"""

from dlojz.race.entering import Entry, enter, entries
from dlojz.race.leaderboard import board, diff, plot_board, told
from dlojz.race.organiser import run, waiting
from dlojz.race.ranking import Standing, standings
from dlojz.race.rules import Race, RaceError, new, open_race

__all__ = [
    "Entry",
    "Race",
    "RaceError",
    "Standing",
    "board",
    "diff",
    "enter",
    "entries",
    "new",
    "open_race",
    "plot_board",
    "run",
    "standings",
    "told",
    "waiting",
]
