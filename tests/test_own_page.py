"""The page on one's own trainer has a program that does what it says."""

import re
import subprocess
import sys
from pathlib import Path

from dlojz.runs import stats

PAGE = Path(__file__).parent.parent / "docs" / "own.md"


def test_the_ten_lines_with_the_chronometer_give_a_log(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    monkeypatch.setenv("DLOJZ_RUN", str(tmp_path / "run"))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    found = stats.summary(tmp_path / "run")
    assert (found.state, found.model, found.optimizer) == ("COMPLETED", "linear", "SGD")
    assert found.images_per_s > 0
    assert {*found.shares} == {"data", "transfer", "forward", "backward", "update"}
    numbered = re.findall(r"# (\d+)$", program, re.M)
    assert numbered == [str(n) for n in range(1, 11)]
