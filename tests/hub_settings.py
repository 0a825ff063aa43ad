"""Try settings of a hub without a hub, with the Python of its environment.

hub_settings.py FOLDER TRAINEE   standard input: settings, texts of profiles.toml, a trainee's
                                 options and forms, homes with a job's log, commands

It prints what came of each.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from traitlets.config.loader import PyFileConfigLoader


def load(name="slurm_cluster.py"):
    return PyFileConfigLoader(name, sys.argv[1]).load_config()


def refused(text):
    Path(os.environ["HUB_PROFILES"]).write_text(text)
    return said_of("slurm_cluster.py")


def door(settings):
    usual = dict(os.environ)
    os.environ |= settings
    try:
        return said_of("one_machine.py")
    finally:
        os.environ |= usual


def said_of(name):
    try:
        load(name)
    except SystemExit as end:
        return str(end)


def chosen(options):
    spawner = SimpleNamespace()
    try:
        config.Spawner.apply_user_options(spawner, options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return spawner.user_options["profile"]


async def words(home):
    fake = SimpleNamespace(user=SimpleNamespace(name=sys.argv[2]), job_id="7")
    fake.user_env, fake.run_command = lambda env: {"HOME": home}, run
    return await Server.last_words(fake)


async def run(command):
    return await Server.run_command(None, command)


async def outcome(command):
    try:
        return await run(command)
    except RuntimeError as error:
        return f"RuntimeError: {error}"


async def polled(name):
    """Look at the server of an earlier hub whose process has the number 1 now."""
    spawner = load("one_machine.py").JupyterHub.spawner_class()
    spawner.user, spawner.pid = SimpleNamespace(name=name), 1
    return await spawner.poll()


async def outcomes():
    """Return what comes of all that waits, at once."""
    kinds = {
        "words": map(words, given["homes"]),
        "commands": map(outcome, given["commands"]),
        "polled": map(polled, [sys.argv[2], "root"]),
    }
    lists = await asyncio.gather(*(asyncio.gather(*each) for each in kinds.values()))
    return dict(zip(kinds, lists, strict=True))


given = json.load(sys.stdin)
said = {"doors": [*map(door, given["doors"])], "refused": [*map(refused, given["profiles"])]}
del os.environ["HUB_PROFILES"]
config = load()
Server = config.JupyterHub.spawner_class
Server.run_command.__globals__["COMMAND_S"] = 3
said["chosen"] = [*map(chosen, given["options"])]
said["forms"] = [chosen(config.Spawner.options_from_form(form)) for form in given["forms"]]
print(json.dumps(said | asyncio.run(outcomes())))
