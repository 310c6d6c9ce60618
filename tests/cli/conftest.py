"""The verbs with a scripted model in place of a loaded one."""

from __future__ import annotations

import logging

import pytest
from scripted import TINY, ScriptedEngine, reciting, tiny_ids

from coli.cli import common
from coli.cli.main import main
from coli.model import Model


@pytest.fixture
def cli(monkeypatch):
    """Run a command line on a scripted model: ``cli(["run", "m", "Go"], "the answer")`` -> exit status.

    ``cli.model`` is the model of the last call, ``cli.args`` what the verb asked to be loaded.
    """

    class Runner:
        model: Model
        engine: ScriptedEngine

        def __call__(self, argv, *answers, folder=TINY, script=None, **options):
            script = script or reciting(*(tiny_ids(answer) for answer in answers))
            self.engine = ScriptedEngine(script, **options)
            self.model = Model(self.engine, folder)

            def load(args):
                self.args = args
                return self.model

            monkeypatch.setattr(common, "load_model", load)
            logging.getLogger("coli").handlers.clear()  # the last test's standard error is not this one's
            return main(argv)

    return Runner()
