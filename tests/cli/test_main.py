"""The front door: verbs, errors as lines, statuses, and what it costs to ask for help."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import coli
from coli.cli import main as cli
from coli.errors import PlacementError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def verb(monkeypatch):
    """Register a verb whose run() is the given function."""

    def register(run, add_arguments=lambda parser: None):
        module = ModuleType("coli.cli.bench")
        module.HELP, module.run, module.add_arguments = "help of the verb", run, add_arguments
        monkeypatch.setitem(sys.modules, "coli.cli.bench", module)
        monkeypatch.setattr(cli, "_exists", lambda name: name == "bench")

    return register


def raising(error):
    def run(args):
        raise error

    return run


def test_verb_runs_with_its_arguments_and_its_status(verb):
    """A verb adds its own arguments and its return value is the exit status."""
    verb(lambda args: args.n, lambda parser: parser.add_argument("--n", type=int))
    assert cli.main(["bench", "--n", "0"]) == 0
    assert cli.main(["bench", "--n", "1"]) == 1


def test_flags_may_stand_between_positional_arguments(verb):
    """`coli run demo --max-tokens 8 "Once"` is how people write it."""
    seen = {}

    def add_arguments(parser):
        parser.add_argument("model")
        parser.add_argument("prompt", nargs="?")
        parser.add_argument("--n", type=int)

    verb(lambda args: seen.update(vars(args)) or 0, add_arguments)
    assert cli.main(["bench", "demo", "--n", "8", "Once"]) == 0
    assert seen == {"model": "demo", "prompt": "Once", "n": 8}


def test_coli_error_is_one_line_and_status_2(verb, capsys):
    """What is wrong is one line on standard error; standard output stays empty."""
    verb(raising(PlacementError("lmhead does not fit")))
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr() == ("", "coli: error: lmhead does not fit\n")


def test_error_names_the_flag_that_was_given(verb, capsys, monkeypatch):
    """Deep down a setting is called by its variable; who gave the flag is told of the flag."""
    verb(raising(PlacementError("COLI_PLACE='x': no")), lambda parser: parser.add_argument("--place"))
    assert cli.main(["bench", "--place", "x"]) == 2
    assert capsys.readouterr().err == "coli: error: --place='x': no\n"
    verb(raising(PlacementError("COLI_PLACE='x': no")), lambda parser: parser.add_argument("--place"))
    monkeypatch.setenv("COLI_PLACE", "x")
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "coli: error: COLI_PLACE='x': no\n"


def test_wrong_usage_is_one_line_and_status_2(verb, capsys):
    """argparse's complaints are one line too and say where the usage is shown."""
    verb(lambda args: 0)
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--no-such-flag"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "coli: error: unrecognized arguments: --no-such-flag (coli bench --help shows the usage)\n"


def test_unknown_verb_names_the_known_ones(capsys):
    """A verb that does not exist is refused with those that do."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["brun"])
    assert caught.value.code == 2
    assert "'run'" in capsys.readouterr().err


def test_no_verb_shows_the_help_and_is_wrong_usage(capsys):
    """`coli` alone explains itself, on standard error."""
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "coli VERB" in err


def test_interrupt_is_status_130(verb):
    """Ctrl-C ends quietly, with the status that shells expect."""
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["bench"]) == 130


@pytest.mark.parametrize("hides", [True, False])
def test_interrupt_that_an_import_made_something_else_of_is_quiet(verb, capsys, hides):
    """NumPy's C code answers Ctrl-C with an ImportError and a page of advice, a class body with a RuntimeError."""

    def run(args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt as error:
            if hides:
                raise ImportError("IMPORTANT: PLEASE READ THIS") from None
            raise RuntimeError("Error calling __set_name__") from error

    def hiding(args):
        try:
            run(args)
        except ImportError as error:
            text = str(error)
        raise ImportError(text)  # with nothing behind it

    verb(hiding if hides else run)
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_error_while_an_interrupt_is_handled_is_said(verb, capsys):
    """Heat that cannot be written on the way out is news, Ctrl-C or not."""

    def run(args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        finally:
            raise RuntimeError("heat lost")

    verb(run)
    assert cli.main(["bench"]) == 1
    assert "RuntimeError: heat lost" in capsys.readouterr().err


def test_import_that_fails_by_itself_is_said(verb, capsys):
    """Without an interrupt an ImportError is an error like any other."""
    verb(raising(ImportError("no such package")))
    assert cli.main(["bench"]) == 1
    assert "ImportError: no such package" in capsys.readouterr().err


def test_internal_error_is_one_line_unless_debugging(verb, capsys, monkeypatch):
    """A bug of ours is status 1, one line with its type; the traceback comes with COLI_LOG=debug."""
    verb(raising(ZeroDivisionError("oops")))
    monkeypatch.delenv("COLI_LOG", raising=False)
    assert cli.main(["bench"]) == 1
    err = capsys.readouterr().err
    assert err == "coli: ZeroDivisionError: oops (COLI_LOG=debug shows where)\n"
    monkeypatch.setenv("COLI_LOG", "debug")
    assert cli.main(["bench"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_bad_setting_and_unknown_variable_are_said(verb, capsys, monkeypatch):
    """A bad COLI_LOG is bad input; an unknown COLI_ variable is a warning and no more."""
    verb(lambda args: 0)
    monkeypatch.setenv("COLI_LOG", "loud")
    assert cli.main(["bench"]) == 2
    assert "COLI_LOG='loud'" in capsys.readouterr().err
    monkeypatch.delenv("COLI_LOG")
    monkeypatch.setenv("COLI_PLCE", "off")
    code = "import sys, coli.cli.main as m; sys.exit(m.main(['eval', 'x', '--text', '/nonexistent/text']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "[settings] warning: COLI_PLCE" in done.stderr and "COLI_PLACE" in done.stderr


def test_broken_pipe_is_quiet():
    """`coli ... | head` prints no traceback, neither from us nor from the interpreter's last flush."""
    code = (
        "import sys, types, coli.cli.main as m\n"
        "v = types.ModuleType('coli.cli.bench'); v.HELP = ''; v.add_arguments = lambda p: None\n"
        "v.run = lambda a: [print('x' * 99) for _ in range(9999)] and 0\n"
        "sys.modules['coli.cli.bench'] = v; m._exists = lambda name: True\n"
        "sys.exit(m.main(['bench']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def shell(command: str) -> subprocess.CompletedProcess:
    """A command line in a shell that closes or redirects streams; ``coli`` is the one under test."""
    return subprocess.run(
        ["bash", "-c", command.replace("coli ", f"{sys.executable} -m coli ")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


RUN = "coli run demo --devices none --max-tokens 2 It"


def test_closed_standard_output_is_one_line_and_status_2():
    """Who closed the stream that the answer goes to is told so before the model is loaded; so is who asks for help."""
    for command in (RUN, "coli --help", "coli inspect demo"):
        done = shell(f"{command} >&-")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("coli: error: standard output is closed") and done.stderr.count("\n") == 1


def test_closed_standard_error_changes_neither_answer_nor_status():
    """Lines that were meant for standard error go nowhere, least of all into the answer."""
    done = shell(f"{RUN} 2>&-")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == shell(RUN).stdout
    for command in ("coli inspect x 2>&-", "coli run --no 2>&-"):
        done = shell(command)
        assert (done.returncode, done.stdout) == (2, "")


def test_full_standard_error_changes_no_status():
    """What cannot be said is not said; status and answer stay."""
    assert shell("coli inspect x 2>/dev/full").returncode == 2
    done = shell(f"{RUN} 2>/dev/full")
    assert (done.returncode, done.stdout) == (0, shell(RUN).stdout)


def test_closed_standard_input_is_named_where_the_prompt_was_to_come_from_it():
    """With a prompt at hand nobody asks for it."""
    assert shell(f"{RUN} <&-").returncode == 0
    done = shell("coli run demo --devices none <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("coli: error: standard input is closed") and done.stderr.count("\n") == 1


def test_full_disk_behind_standard_output_is_one_line_and_status_1():
    """The answer is lost, and that is said."""
    done = shell("coli inspect demo >/dev/full")
    assert (done.returncode, done.stderr) == (1, "coli: error: standard output: No space left on device\n")


def test_version_is_the_packages(capsys):
    """One version: of the package and of pyproject.toml."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"coli {coli.__version__}\n"
    assert f'version = "{coli.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_every_verb_that_exists_keeps_the_contract():
    """HELP, add_arguments and run, and a --help that can be printed; listed in the top help, and nothing else is."""
    import argparse
    import importlib

    present = [name for name in cli.VERBS if (ROOT / "coli" / "cli" / f"{name}.py").exists()]
    assert {"run", "chat", "eval"} <= set(present)
    for name in present:
        module = importlib.import_module(f"coli.cli.{name}")
        parser = argparse.ArgumentParser(prog=name, description=module.HELP)
        module.add_arguments(parser)
        assert parser.format_help()
        assert callable(module.run)
    shown = cli._top_parser().format_help()
    assert [name for name in cli.VERBS if f"\n  {name:<9} " in shown] == present


@pytest.mark.parametrize("verb", ["run", "chat", "serve", "bench"])
def test_help_of_model_says_that_a_hub_id_will_do(verb, capsys):
    """What is accepted is written where people look for it."""
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert "the id of a model on the Hugging Face hub" in " ".join(capsys.readouterr().out.split())


def test_help_costs_at_most_60_ms_over_an_empty_program():
    """`coli --help` is instant.  Processor time, the least of several runs: a busy machine inflates the clock's."""

    def least_s(*arguments: str) -> float:
        times = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    assert least_s("-m", "coli", "--help") - least_s("-c", "pass") <= 0.060
