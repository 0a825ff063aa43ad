"""Which sizes, and which devices."""

import os

import pytest

from dlojz.course import presets


def test_a_preset_is_chosen_by_name_then_environment_then_hardware(monkeypatch):
    monkeypatch.setenv("DLOJZ_PRESET", "smoke")
    assert presets.choose().name == "smoke"
    assert presets.choose("gpu").name == "gpu"
    monkeypatch.delenv("DLOJZ_PRESET")
    monkeypatch.setattr(presets, "gpus", lambda: ())
    assert presets.choose().name == "cpu"
    monkeypatch.setattr(presets, "gpus", lambda: ("GPU-1",))
    assert presets.choose().name == "gpu"


def test_a_login_node_without_a_gpu_takes_the_clusters_sizes(monkeypatch, tmp_path):
    monkeypatch.delenv("DLOJZ_PRESET")
    monkeypatch.delenv("DLOJZ_LAUNCHER", raising=False)
    monkeypatch.setattr(presets, "gpus", lambda: ())
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(presets.shutil, "which", lambda program: f"/usr/bin/{program}")
    assert presets.choose().name == "cpu", "Slurm is installed, and not set up"
    (tmp_path / "slurm.conf").touch()
    assert presets.choose().name == "cluster"
    monkeypatch.setenv("DLOJZ_LAUNCHER", "local")
    assert presets.choose().name == "cpu"
    monkeypatch.setenv("DLOJZ_LAUNCHER", "slurm")
    assert presets.choose().name == "cluster"


def test_a_preset_is_shown_in_short_lines():
    """It is the first thing that a trainee's first cell shows."""
    for preset in presets.PRESETS.values():
        lines = repr(preset).splitlines()
        assert lines[0] == f"preset    {preset.name}"
        assert max(map(len, lines)) <= 80


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(ValueError, match="expected one of smoke, cpu, gpu, cluster"):
        presets.choose("huge")


def test_the_flags_of_a_preset_are_flags_of_the_trainer():
    for preset in presets.PRESETS.values():
        words = preset.flags.split() + preset.cpu_flags.split()
        flags = {"--model", "--image-size", "-b", "--test-nsteps"}
        assert {w for w in words if w.startswith("-")} == flags
        assert preset.batch_size in preset.batch_sizes


@pytest.mark.parametrize(
    ("found", "expected", "visible"),
    [((), ("cpu", 2), "7"), (("a",), ("cpu", 2), ""), (("a", "b", "c"), ("gpu", 3), "7")],
)
def test_several_processes_have_a_gpu_each_or_none(found, expected, visible, monkeypatch):
    monkeypatch.delenv("DLOJZ_PRESET")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    answers = [found, () if len(found) == 1 else found]  # before and after they are hidden

    def gpus():
        return answers[0]

    gpus.cache_clear = lambda: answers.pop(0)
    monkeypatch.setattr(presets, "gpus", gpus)
    preset, processes = presets.several()
    assert (preset.name, processes) == expected
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_a_notebook_asks_for_the_cpus_that_its_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    assert presets.cpus() == 3
