"""A race with oneself can be made and entered again and again, by cells that run again."""

import pytest

from dlojz import race
from dlojz.chapters import n14_race as n14

FLAGS = "--model resnet18 --image-size 24"


@pytest.fixture
def mine(course_folder):
    return n14.own_race("mine", "smoke", seconds=20)


def test_a_race_is_made_once_with_its_images(mine, course_folder, capsys):
    again = n14.own_race("mine", "smoke", seconds=99)
    assert again == mine
    assert "keeps seconds=20: for other rules" in capsys.readouterr().out
    assert (mine.classes, mine.seconds) == (2, 20)
    assert len([*course_folder.glob("races/images-smoke/*/*/*.JPEG")]) == 2 * (16 + 8)


def test_the_same_entry_is_entered_once(mine):
    first = n14.enter(mine, "first", f"dlojz/dlojz.py {FLAGS}")
    assert n14.enter(mine, "first", f"dlojz/dlojz.py {FLAGS}") == first
    assert n14.enter(mine, "other", f"dlojz/dlojz.py {FLAGS}").name == "first"


def test_an_edited_one_gets_a_free_name(mine, course_folder):
    n14.enter(mine, "mine", f"dlojz/dlojz.py {FLAGS}")
    names = [n14.enter(mine, "mine", f"dlojz/dlojz.py {FLAGS} -e {n}").name for n in (2, 3)]
    assert names == ["mine-2", "mine-3"]
    trainer = course_folder / "dlojz/dlojz.py"
    trainer.write_text(trainer.read_text() + "# edited\n")
    assert n14.enter(mine, "mine", f"dlojz/dlojz.py {FLAGS}").name == "mine-4"


def test_edited_trainers_can_be_entered(mine):
    n14.enter(mine, "mine", f"{n14.edited('validated-once')} {FLAGS}")
    n14.enter(mine, "cheat", f"{n14.edited('cheat')} {FLAGS}")
    shown = str(race.diff(mine, "cheat", "mine"))
    assert "+        chrono.next_iter(epoch=epoch, step=step, images=1000 * len(images)" in shown
