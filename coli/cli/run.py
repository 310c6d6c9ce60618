"""``coli run``: one prompt, one answer, streamed to standard output."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from coli.cli import common
from coli.errors import RequestError
from coli.log import logger

if TYPE_CHECKING:
    from coli.engine.generate import Generation
    from coli.model import Model

HELP = (
    "Continue a prompt, given as text, --file, --ids or standard input. The answer, and nothing else, goes to standard "
    "output, with a newline at its end. Greedy, unless --temperature, --top-k, --top-p, --min-p or --seed asks for a "
    "draw; without --temperature that is at the temperature of the checkpoint's generation_config.json, else at 1."
)
_PROMPT_HELP = (
    "the prompt; without one, standard input is read. Text is taken as it is, byte for byte: the newline at the end of "
    "a file, or of what echo prints, is a part of the prompt (printf prints none)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=_PROMPT_HELP)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--file", metavar="FILE", help="read the prompt from a file (- is standard input)")
    source.add_argument("--ids", metavar="1,2,3", help="the prompt as token ids")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--raw", action="store_true", help="no chat template; control tokens in the prompt count (default)"
    )
    mode.add_argument("--chat", action="store_true", help="the prompt is a user's message, put into the chat template")
    parser.add_argument("--no-thinking", action="store_true", help="with --chat: ask the template for no thinking")
    common.add_sampling(parser, max_tokens=256)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> int:
    common.check_sampling(args)
    prompt = _prompt(args)
    with common.load_model(args) as model:
        sampling = common.sampling_of(args, model)
        if not model.has_tokenizer and args.ids is None:
            _ = model.tokenizer  # raises the one line that says so
        if args.chat:
            generation = _chat(model, prompt, args, sampling)
        else:
            generation = model.generate(prompt, **sampling)
            _stream(model, generation)
        cut = common.cut_line(generation, model, args.max_tokens, chat=args.chat)
        logger("run").info("; ".join([common.speed_line(generation), *([cut] if cut else [])]))
    return 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt is not None and (args.file is not None or args.ids is not None):
        other = "--file" if args.file is not None else "--ids"
        raise RequestError(f"the prompt is given twice, as text and by {other}; give one")
    if args.no_thinking and not args.chat:
        raise RequestError("--no-thinking speaks to the chat template; add --chat")
    if args.ids is not None:
        if args.chat:
            raise RequestError("--ids is a whole prompt and takes no chat template; leave out --chat")
        return _ids(args.ids)
    if args.prompt is not None:
        return args.prompt
    if args.file is None and sys.stdin.isatty():
        raise RequestError('no prompt: give it as text (coli run MODEL "..."), by --file or --ids, or pipe it in')
    return common.read_text(args.file or "-")


def _ids(text: str) -> list[int]:
    ids = []
    for item in text.split(","):
        if not item.strip().isdecimal():
            raise RequestError(
                f"--ids holds {item.strip()!r:.80}; token ids separated by commas were expected", param="ids"
            )
        ids.append(int(item))
    return ids


def _stream(model: Model, generation: Generation) -> None:
    """Print an answer as it comes: its text, or its ids where the model has no tokenizer."""
    if model.has_tokenizer:
        last = ""
        for last in generation:
            sys.stdout.write(last)
            sys.stdout.flush()
        sys.stdout.write("" if last.endswith("\n") else "\n")
        return
    separator = ""
    while (token := generation.next_token()) is not None:
        sys.stdout.write(f"{separator}{token.sample.id}")
        sys.stdout.flush()
        separator = ","
    sys.stdout.write("\n")


def _chat(model: Model, prompt: str | list[int], args: argparse.Namespace, sampling: dict[str, Any]) -> Generation:
    enable_thinking = False if args.no_thinking else None
    answer = model.chat([{"role": "user", "content": prompt}], enable_thinking=enable_thinking, **sampling)
    thought = common.ThoughtWriter()
    last = ""
    for delta in answer.deltas():
        if delta.channel == "reasoning":
            thought.write(delta.text)
            continue
        thought.end()
        last = delta.text
        sys.stdout.write(last)
        sys.stdout.flush()
    thought.end()
    sys.stdout.write("" if last.endswith("\n") else "\n")
    return answer.generation
