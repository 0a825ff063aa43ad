"""The launcher on a real Slurm: two nodes, four fake GPUs; states, limits, failures, names."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import nbclient
import nbformat
import psutil
import pytest
from waiting import assert_hostile_names_are_only_names, text, until

from conftest import cancel_all, make_course_folder, use_cluster
from dlojz import launch
from dlojz.check import check
from dlojz.figures.diagnosis import diagnosis
from dlojz.launch import State, SubmitError, asking, find, latest, queue, slurm, submit
from dlojz.launch.asking import FRESH_S  # as it is shipped: the fixtures ask more often
from dlojz.runs import log, stats


def completed(job, seconds=120):
    assert job.wait(seconds) == State.COMPLETED, job.explain()
    return text(job)


@pytest.fixture(scope="module", autouse=True)
def begun_early(cluster, tmp_path_factory):
    """What waits for Slurm's own intervals, begun before all tests, on nodes of its own.

    Two jobs that pass their time limit, with and without a checkpoint, and one whose node fails.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = make_course_folder(tmp_path_factory.mktemp("early"), patch)
        use_cluster(cluster, folder, patch)
        site = folder / "slurm" / "sites" / "fixture.toml"
        for name, code in (("listens.py", LISTENS), ("stubborn.py", STUBBORN)):
            (folder / name).write_text(textwrap.dedent(code))
        site.write_text(site.read_text().replace('"main"', '"short"'))
        limited = submit(["listens.py --mine", "stubborn.py"], time_max="00:01:00")
        site.write_text(site.read_text().replace('"short"', '"fails"'))
        fails = submit("stubborn.py", n_gpu=4)
        until(lambda: begun(fails) == ["0"] * 4)
        kill_node(cluster, "node5")
    yield *limited, fails
    cancel_all(cluster, "short,fails")


@pytest.fixture
def early(on_slurm, begun_early, monkeypatch):
    """These jobs, where they were submitted."""
    monkeypatch.setenv("DLOJZ_ROOT", str(begun_early[0].directory.parents[1]))
    return begun_early


# One job ---------------------------------------------------------------------------------------


def test_a_job_runs_on_a_node_with_its_flags_and_is_kept(on_slurm, script):
    script("import socket, sys; print(socket.gethostname(), sys.argv[1:])")
    job = submit("t.py --a 'b c' -d", name="first")
    assert job.info["slurm"].isdigit()
    assert completed(job).split(" ", 1)[1] == "['--a', 'b c', '-d']\n"
    assert text(job).startswith("node")
    assert repr(job) == "<job 0001 'first': COMPLETED>"
    assert job.status["ended"] >= job.status["started"]
    assert find(1) == latest() == job


def test_a_job_of_these_tests_is_forked_and_has_its_nodes_name(on_slurm, script):
    """As Python on that node: with the program's folder on the path."""
    script("# forked\nimport os, socket, sys\nprint('torch' in sys.modules, socket.gethostname())\n"
           "print(os.path.dirname(os.path.abspath(__file__)) in sys.path)")  # fmt: skip
    forked, name, has_folder = completed(submit("t.py")).split()
    assert (forked, has_folder) == ("True", "True")
    assert name in ("node1", "node2")


def test_a_trainer_finds_the_modules_beside_it(on_slurm, script):
    script("import net; print(net.name)")
    edited = script("name = 'before'", "net.py")
    job = submit("t.py", n_gpu=2)
    edited.write_text("name = 'after'")
    assert completed(job) == "before\nbefore\n"


def test_a_program_has_the_current_folder_that_it_has_by_hand(on_slurm, course_folder, monkeypatch):
    folder = course_folder.parent / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import os; print(os.getcwd(), open('words.txt').read())")
    (folder / "words.txt").write_text("words")
    monkeypatch.chdir(folder)
    assert completed(submit("train.py")) == f"{folder} words\n"


def test_a_program_is_watched_on_a_node(on_slurm, course_folder):
    (course_folder / "mine.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for batch in torch.utils.data.DataLoader(torch.randn(240, 8), 8):\n"
        "    model(batch).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    job = submit("mine.py", watch=True)
    completed(job)
    assert stats.summary(job).images_per_s > 0
    assert len(diagnosis(job)) == 3


def test_what_slurm_forgets_is_remembered(on_slurm, script, monkeypatch):
    script("import sys; sys.exit(int(sys.argv[1]))")
    well, badly = submit(["t.py 0", "t.py 3"])
    until(lambda: all((j.directory / "exit_code").exists() for j in (well, badly)))
    monkeypatch.setattr(asking, "show", lambda number: {})  # as minutes after the end
    assert well.wait(30) == State.COMPLETED
    assert badly.wait(30) == State.FAILED
    assert badly.status["reason"] == "exit code 3"
    lost = submit("t.py 0")
    until(lambda: (lost.directory / "exit_code").exists())
    (lost.directory / "exit_code").unlink()
    assert lost.wait(30) == State.FAILED
    assert "Slurm no longer knows it" in lost.status["reason"]


def test_a_controller_that_does_not_answer_is_told(on_slurm, script, monkeypatch, tmp_path):
    script("import time; time.sleep(99)")
    job = submit("t.py")
    until(lambda: job.state == State.RUNNING)
    elsewhere = tmp_path / "slurm.conf"
    conf = on_slurm.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1")
    elsewhere.write_text(conf + "MessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(elsewhere))
    until(lambda: "Slurm does not answer" in (job.status["reason"] or ""))
    assert job.state == State.RUNNING, "what was last known"


def test_a_state_that_cannot_be_kept_is_shown(tmp_path, monkeypatch):
    """On a full disk, say; here there is no runs/ to write to."""
    monkeypatch.setenv("DLOJZ_ROOT", str(tmp_path / "nowhere"))
    monkeypatch.setattr(asking, "_squeue", lambda: {"7": {"JobState": "RUNNING"}})
    run = tmp_path / "nowhere" / "runs" / "0001"
    assert slurm.Slurm().status(run, {"slurm": "7", "submitted": 0.0})["state"] == "RUNNING"


def test_out_of_memory_is_told_from_the_log(on_slurm):
    job = submit("dlojz.py --test --data synthetic --model resnet18 --image-size 100000 -b 64")
    assert job.wait(120) == State.OUT_OF_MEMORY, job.explain()


def test_hostile_names_are_only_names(on_slurm, course_folder):
    assert_hostile_names_are_only_names(course_folder)


def test_a_hostile_course_folder_is_only_a_folder(on_slurm, script, course_folder, monkeypatch):
    root = course_folder.parent / "a'; echo foo $(touch pwned) %j JobState=FAILED"
    course_folder.rename(root)
    monkeypatch.setenv("DLOJZ_ROOT", str(root))
    monkeypatch.chdir(root)
    (root / "t.py").write_text("print('well')")
    assert completed(submit("t.py")) == "well\n"


# Several processes -----------------------------------------------------------------------------

WHO = """
    import dataclasses, json, os, sys
    from dlojz import idr_torch
    found = {name: getattr(idr_torch, name) for name in
             (*(f.name for f in dataclasses.fields(idr_torch.Ranks)), "is_master")}
    found["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    with open(f"{os.environ['DLOJZ_RUN']}/{found['rank']}.json", "w") as file:
        json.dump(found, file)
    """


def who(job, size):
    return [json.loads(text(job, f"{rank}.json")) for rank in range(size)]


def are_four_on_two_nodes(ranks, cpus_per_task):
    """Every field of four processes on two nodes; returns the port where they meet."""
    (port,) = {found.pop("master_port") for found in ranks}
    for rank, found in enumerate(ranks):
        assert found == {
            "rank": rank,
            "local_rank": rank % 2,
            "size": 4,
            "local_size": 2,
            "num_nodes": 2,
            "cpus_per_task": cpus_per_task,
            "gpu_ids": [0, 1],
            "nodelist": "node[1-2]",
            "hostnames": ["node1", "node2"],
            "master_addr": "node1",
            "is_master": rank == 0,
            "visible": "0,1",
        }
    return port


def test_every_field_of_idr_torch_on_two_nodes_with_two_tasks(on_slurm, script):
    script(WHO)
    job = submit("t.py", n_gpu=4)
    completed(job)
    port = are_four_on_two_nodes(who(job, 4), cpus_per_task=1)
    assert 10_000 <= port < 29_500


def test_every_field_of_idr_torch_under_srun_torchrun(on_slurm, script, course_folder):
    path = script(WHO)
    out = course_folder / "runs" / "by-hand"
    out.mkdir(parents=True)
    run = (
        "srun --export=ALL --ntasks-per-node=1 --cpus-per-task=4 "
        f"{sys.executable} -P -m torch.distributed.run --nnodes=2 --nproc-per-node=2 "
        f"--rdzv-backend=c10d --rdzv-endpoint=node1:23456 --rdzv-id=1 {path}"
    )
    number = on_slurm.call(
        *("sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--cpus-per-task=4"),
        *("--gres=gpu:2", f"--output={out}/out", f"--export=ALL,DLOJZ_RUN={out}", "--wrap", run),
    ).strip()
    until(lambda: asking.show(number)["JobState"] in ("COMPLETED", "FAILED"), 120)
    assert asking.show(number)["JobState"] == "COMPLETED", (out / "out").read_text()
    job = launch.Job(out)
    # torchrun says nothing of CPUs: its processes share those that the agent may use.
    cpus = max(1, len(os.sched_getaffinity(0)) // 2)
    assert are_four_on_two_nodes(who(job, 4), cpus_per_task=cpus) > 0


def test_every_field_of_idr_torch_alone(on_slurm, script):
    script(WHO)
    job = submit("t.py")
    completed(job)
    (found,) = who(job, 1)
    node = found["nodelist"]
    assert node in ("node1", "node2")
    assert found == {
        "rank": 0,
        "local_rank": 0,
        "size": 1,
        "local_size": 1,
        "num_nodes": 1,
        "cpus_per_task": 1,
        "gpu_ids": [0],
        "nodelist": node,
        "hostnames": [node],
        "master_addr": "127.0.0.1",
        "master_port": 0,
        "is_master": True,
        "visible": "0",
    }


def test_one_process_that_fails_ends_the_others_and_its_error_is_shown(on_slurm, script):
    script("""
        import os, time
        if os.environ["SLURM_PROCID"] == "3": raise ValueError("the reason")
        time.sleep(99)
        """)
    job = submit("t.py", n_gpu=4)
    assert job.wait(60) == State.FAILED
    assert "ValueError: the reason" in job.explain()


def test_a_job_never_takes_part_of_two_nodes(on_slurm, script):
    script("")
    with pytest.raises(SubmitError, match=r"2 GPUs each.*ask for 2 or 4"):
        submit("t.py", n_gpu=3)
    assert launch.jobs() == []


def test_what_slurm_refuses_is_told_and_leaves_nothing(on_slurm, script, course_folder):
    script("")
    site = course_folder / "slurm" / "sites" / "fixture.toml"
    site.write_text(site.read_text().replace('"main"', '"nowhere"'))
    with pytest.raises(SubmitError, match=r"(?s)refused the job.*partition.*nothing was submitted"):
        submit("t.py")
    assert launch.jobs() == []


def test_a_job_that_can_never_start_says_why(on_slurm, script):
    script("")
    job = submit("t.py", n_gpu=64)
    until(lambda: "nodes" in (job.status["reason"] or ""))
    assert job.state == State.QUEUED


def test_the_script_is_usable_by_hand(on_slurm, course_folder):
    number = on_slurm.call(
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2"),
        *("--cpus-per-task=1", "slurm/job.sbatch", "solutions/dlojz_06_ddp.py", "--test"),
        *("--data=synthetic", "--test-nsteps=2", *SMOKE.split()),
    ).strip()
    until(lambda: asking.show(number)["JobState"] in ("COMPLETED", "FAILED"), 120)
    run = course_folder / "runs" / f"slurm-{number}"
    assert asking.show(number)["JobState"] == "COMPLETED", (run / "stderr.txt").read_text()
    assert [r.end["outcome"] for r in log.read_ranks(run)] == ["completed"] * 4


# The queue -------------------------------------------------------------------------------------


def test_a_full_partition_queues_a_job_which_then_runs(on_slurm, script, tmp_path):
    go = tmp_path / "go"
    script(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)")
    fill = submit("t.py", n_gpu=4)
    until(lambda: fill.state == State.RUNNING)
    script("print('at last')", "next.py")
    waiting = submit("next.py", name="next")
    until(lambda: waiting.status.get("reason") == "waits for free nodes")
    assert waiting.state == State.QUEUED
    row = next(r for r in queue().rows if r[0] == waiting.id)
    assert row[2] == "QUEUED"
    go.touch()
    assert completed(waiting) == "at last\n"


def test_a_sweep_runs_side_by_side(on_slurm, script):
    script("import sys, time; print(sys.argv[1]); time.sleep(1)")
    jobs = submit([f"t.py {i}" for i in range(4)], name="sweep")
    assert [completed(j) for j in jobs] == ["0\n", "1\n", "2\n", "3\n"]
    assert latest("sweep") == jobs


def test_a_waiting_job_and_a_running_job_can_be_cancelled(on_slurm, script):
    script("import time; print('runs', flush=True); time.sleep(99)")
    running, waiting = submit("t.py", n_gpu=4), submit("t.py", n_gpu=4)
    until(lambda: running.state == State.RUNNING)
    waiting.cancel()
    assert waiting.wait(30) == State.CANCELLED
    running.cancel()
    assert running.wait(60) == State.CANCELLED
    running.cancel()  # of one that has ended: nothing
    assert text(waiting) == "", "it never ran"
    assert "cancelled" in running.explain()


def test_from_a_notebook_that_runs_in_slurm(on_slurm, script, course_folder):
    """A kernel in a job of its own has Slurm's variables of that job: none reaches the new one."""
    script(WHO)
    outer = script(
        "from dlojz.launch import submit; import sys; job = submit('t.py', n_gpu=2);"
        "job.wait(60); print(job.id, job.state)",
        "kernel.py",
    )
    out = course_folder / "out"
    number = on_slurm.call(
        *("sbatch", "--parsable", "-n1", "--cpus-per-task=1", f"--output={out}", "--wrap"),
        f"srun --export=HOME,PATH,SLURM_CONF,DLOJZ_ROOT,DLOJZ_LAUNCHER {sys.executable} {outer}",
    ).strip()
    until(lambda: asking.show(number)["JobState"] in ("COMPLETED", "FAILED"), 120)
    assert "0001 COMPLETED" in out.read_text()
    assert [found["size"] for found in who(find(1), 2)] == [2, 2]


# A training ------------------------------------------------------------------------------------

SMOKE = "--model shufflenet_v2_x0_5 --image-size 32 -b 4 --num-workers 0 --precision fp32 --lr 0.01"


def in_a_notebook(*cells):
    """Run these cells in a kernel, as JupyterLab would; what the last of them shows."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    return notebook.cells[-1].outputs[0].data


def losses(job):
    return [list(run.steps.loss) for run in log.read_ranks(job.directory)]


def test_a_training_from_a_notebook_on_two_nodes_is_the_one_on_two_processes_here(
    on_slurm, images, monkeypatch
):
    flags = f"{SMOKE} --data {images} --test --test-nsteps 4"
    figure = in_a_notebook(
        "from dlojz.chapters import n06_ddp as n06\nfrom dlojz.launch import submit",
        f"job = submit('solutions/dlojz_06_ddp.py {flags}', n_gpu=4)\njob.wait()",
        "n06.plot_collectives(job);",
    )
    assert "image/png" in figure
    far = latest()
    completed(far)
    hosts = {run.start["hostname"] for run in log.read_ranks(far.directory)}
    assert hosts == {"node1", "node2"}
    monkeypatch.setenv("DLOJZ_LAUNCHER", "local")
    near = submit(f"solutions/dlojz_06_ddp.py {flags} --accumulate 2", n_gpu=2)
    assert near.wait(240) == State.COMPLETED, near.explain()
    far, near = losses(far), losses(near)
    # Process 0 of 2 accumulates the batches of processes 0 and 2 of 4.
    for rank in range(4):
        mine = near[rank % 2][rank // 2 :: 2]
        assert far[rank][: len(mine)] == pytest.approx(mine, rel=1e-3)


def test_a_training_that_is_stopped_goes_on_with_the_same_losses(on_slurm, images):
    flags = f"solutions/dlojz_06_ddp.py {SMOKE} --data {images} -e 2"
    job = submit(flags, n_gpu=2)
    first = job.directory / "events.jsonl"
    until(lambda: first.exists() and first.read_text().count('"step",') >= 5, 120)
    on_slurm.call("scancel", "--batch", "--signal=USR1", job.info["slurm"])  # as before the limit
    until(lambda: (job.directory / "checkpoint.txt").read_text(), 60)
    completed(job, 240)
    whole = submit(flags, n_gpu=2)
    completed(whole, 240)
    for stopped, straight in zip(
        log.read_ranks(job.directory), log.read_ranks(whole.directory), strict=True
    ):
        assert stopped.first_step > 0, "it began twice"
        assert len(stopped.steps) > stopped.first_step
        places = places_of(stopped)
        assert places[stopped.first_step] > (0, 0), "and went on where it was"
        losses = dict(zip(places_of(straight), straight.steps.loss, strict=True))
        assert list(stopped.steps.loss) == [losses[place] for place in places]
        assert places[-1] == max(losses)


def places_of(run):
    return list(zip(run.steps.epoch, run.steps.step, strict=True))


def test_many_monitors_ask_slurm_once_in_two_seconds(on_slurm, script, tmp_path, monkeypatch):
    script("import time; time.sleep(99)")
    jobs = submit([f"t.py {i}" for i in range(8)])
    calls, asked = tmp_path / "calls", tmp_path / "bin"
    asked.mkdir()
    for name in ("squeue", "scontrol"):
        program = asked / name
        program.write_text(f'#!/bin/sh\necho {name} >>{calls}\nexec {shutil.which(name)} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{asked}:{os.environ['PATH']}")
    monkeypatch.setattr(asking, "FRESH_S", FRESH_S)
    time.sleep(2.1)  # what was asked while submitting is too old by now
    end = time.monotonic() + 3

    def watch(job):
        while time.monotonic() < end:
            assert not job.state.final
            time.sleep(0.05)

    with ThreadPoolExecutor(30) as monitors:
        for watching in [monitors.submit(watch, job) for job in jobs * 4]:
            watching.result()
    assert calls.read_text().split().count("squeue") <= 3
    assert "scontrol" not in calls.read_text()


def test_a_series_runs_where_the_job_that_it_is_for_ran(on_slurm, script, monkeypatch):
    """The account, the kind of node and the module of a job are those of its check."""
    script("")
    job = submit("t.py", account="xyz@fake", module="a/1", dry_run=False)
    request = launch.request_of(job)
    assert (request.account, request.module, request.n_gpu) == ("xyz@fake", "a/1", 1)
    check = launch.send([dataclasses.replace(request, name="check")])[0]
    scripts = [(each.directory / "job.sbatch").read_text() for each in (job, check)]
    assert scripts[0].replace("job-name=dlojz", "job-name=check") == scripts[1]
    for each in (job, check):
        each.cancel()


def test_a_check_runs_where_its_job_ran(on_slurm, course_folder, monkeypatch):
    """On the same kind of node, charged to the same account; its verdict names the job."""
    file = course_folder / "slurm" / "sites" / "fixture.toml"
    kind = file.read_text().partition("[gpus.fake]")[2].replace('"main"', '"high"')
    file.write_text(f"{file.read_text()}\n[gpus.other]{kind}")
    flags = (
        "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 8"
    )
    job = submit(f"solutions/dlojz_01_gpu.py {flags}", account="xyz@other")
    completed(job, 240)
    found = check("01", job)
    assert repr(found).startswith("01_gpu: passed (job 0001)"), found
    series = latest("check-01_gpu")
    scripts = [(each.directory / "job.sbatch").read_text() for each in (job, series)]
    assert all("--partition=high" in s and "--account=xyz" in s for s in scripts)


# What goes wrong on a cluster ------------------------------------------------------------------

STUBBORN = """
    import os, time
    with open(f"{os.environ['DLOJZ_RUN']}/begun", "a") as file:
        file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + "\\n")
    while not os.path.exists(f"{os.environ['DLOJZ_RUN']}/go"): time.sleep(0.1)
    """


def begun(job):
    file = job.directory / "begun"
    return file.read_text().split() if file.exists() else []


LISTENS = """
    import os, signal, sys, time
    from pathlib import Path
    run = Path(os.environ["DLOJZ_RUN"])
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    (run / "checkpoint.txt").touch()
    print(sys.argv[1:], flush=True)
    while "--resume" not in sys.argv:
        time.sleep(0.1)
        if asked:
            (run / "checkpoint.txt").write_text("where it was")
            asked.clear()
    """


def test_a_preempted_job_goes_back_to_the_queue_and_runs_again(on_slurm, script, course_folder):
    site = course_folder / "slurm" / "sites" / "fixture.toml"
    site.write_text(site.read_text().replace('"main"', '"low"'))
    script(STUBBORN)
    job = submit("t.py", n_gpu=4)
    until(lambda: begun(job) == ["0", "0", "0", "0"])
    on_slurm.call("srun", "-p", "high", "-N2", "--exclusive", "true", timeout=60)
    until(lambda: len(begun(job)) == 8)
    assert "begun 2 times" in job.status["reason"]
    (job.directory / "go").touch()
    completed(job)


def test_a_node_that_fails_sends_the_job_back_to_the_queue(early, cluster):
    *_, job = early
    until(lambda: cluster.nodes()["node5"].startswith("down"), 90)
    until(lambda: job.state == State.QUEUED, 30)
    start_node("node5", cluster)
    until(lambda: len(begun(job)) == 8, 90)
    (job.directory / "go").touch()
    completed(job)


def kill_node(cluster, node):
    """End all that runs on the node, as a power failure does.

    Slurm would end what is left when the node comes back, and the job that begins again with it.
    """
    daemon = (cluster.folder / "run" / f"slurmd.{node}.pid").read_text().strip()
    host_name = os.readlink(f"/proc/{daemon}/ns/uts")  # each node has a namespace of its own
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(f"/proc/{pid}/ns/uts") == host_name:
                os.kill(pid, signal.SIGKILL)


def start_node(node, cluster):
    subprocess.run(
        ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -N {node}"],
        env={**os.environ, "SLURM_CONF": str(cluster.conf)},
        check=True,
        timeout=30,
    )


def test_a_job_longer_than_its_time_limit_finishes_if_it_keeps_a_checkpoint(early):
    """By Slurm's own signal before the limit; one that keeps none ends there."""
    job, without, _ = early
    assert completed(job, 180) == "['--mine']\n['--mine', '--resume', 'where it was']\n"
    assert without.wait(180) == State.TIMEOUT
    assert "without a checkpoint" in without.explain()
    assert "shortly before, process 0: line " in without.status["reason"]
    assert list(without.directory.glob("stacks.node*.txt"))


@pytest.mark.parametrize(
    ("slurm_state", "state", "words"),
    [
        ("NODE_FAIL", "NODE_FAIL", "one of its nodes failed"),
        ("PREEMPTED", "PREEMPTED", "higher priority"),
        ("BOOT_FAIL", "FAILED", "a node did not start"),
        ("DEADLINE", "FAILED", "its deadline passed"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", "more memory"),
        ("CANCELLED", "CANCELLED", "cancelled"),
        ("COMPLETED", "COMPLETED", "no Chronometer in it"),
        ("SUSPENDED", "RUNNING", "continues automatically"),
        ("REQUEUE_HOLD", "QUEUED", "scontrol release"),
    ],
)
def test_every_state_is_told_in_words(tmp_path, slurm_state, state, words):
    fields = {"JobState": slurm_state, "ExitCode": "1:0", "NodeList": "node[1-2]"}
    found = asking.status(tmp_path, fields)
    assert found["state"] == state
    assert words in found["reason"]
    assert State(state)
