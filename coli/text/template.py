"""The checkpoint's own chat template: messages in, the prompt's text and ids out.

The template runs in Jinja's immutable sandbox with what templates of Hugging Face checkpoints expect of their
surroundings.  ``chat_template.jinja`` wins over ``chat_template`` in tokenizer_config.json.

Control tokens that a person typed stay text.  Each one inside the messages is replaced, before rendering, by one
private-use character; what is a control token in the rendered text was then put there by the template, and only those
become ids.  Afterwards the characters are turned back and their surroundings encoded as plain text.  A second rendering
without the replacement guards against templates that look for the tokens themselves (``</think>`` in an assistant's
turn, ``<tool_response>`` around a user's): the text must be the same in the end.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox

from coli.config import one_line
from coli.errors import ModelError, RequestError
from coli.text.defaults import read_json_if_present
from coli.text.messages import check_tools, normalise_messages
from coli.text.thinking import Thinking, thinking_of_prompt
from coli.text.tokenizer import Tokenizer

FILE_NAME, CONFIG_NAME = "chat_template.jinja", "tokenizer_config.json"
_LONGEST_TEXT = 1 << 26  # far beyond any context; what is longer is a template's mistake or malice
_PRIVATE_USE = range(0x100000, 0x10FFFE)  # plane 16, where no font and hardly any text lives
_TYPED_BY_OTHERS = ("user", "tool")  # of their turns not even <think> or <tool_call> may become a token
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Prompt(NamedTuple):
    """A rendered conversation: its text, its ids, and whether it ends inside a thought."""

    text: str
    ids: list[int]
    thinking: Thinking


class TemplateSources(NamedTuple):
    """Where a folder holds chat templates.  ``used`` names the file that wins, None where there is none."""

    used: str | None
    text: str | None
    differ: bool


def template_sources(folder: Path) -> TemplateSources:
    """The chat template of a container folder, and whether its two possible places disagree."""
    folder = Path(folder)
    path = folder / FILE_NAME
    try:
        from_file = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as UTF-8 text ({one_line(error)})") from None
    from_config = read_json_if_present(folder / CONFIG_NAME).get("chat_template")
    if isinstance(from_config, list):  # older files: a list of named templates
        named = [t for t in from_config if isinstance(t, dict) and t.get("name") == "default"]
        from_config = named[0].get("template") if named else None
    if from_config is not None and not isinstance(from_config, str):
        raise ModelError(f"{folder / CONFIG_NAME}: chat_template is {type(from_config).__name__}; text was expected")
    differ = from_file is not None and from_config is not None and from_file.rstrip() != from_config.rstrip()
    if from_file is not None:
        return TemplateSources(FILE_NAME, from_file, differ)
    return TemplateSources(CONFIG_NAME if from_config is not None else None, from_config, False)


class ChatTemplate:
    """A compiled chat template together with the tokenizer that its text is for."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, name: str = FILE_NAME, tokens: Mapping[str, str] | None = None
    ) -> None:
        """``tokens``: the tokenizer's named tokens (``eos_token`` and so on), which templates may mention."""
        self._tokenizer = tokenizer
        self._tokens = dict(tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{name}: line {error.lineno} is not valid Jinja ({error.message})") from None
        except Exception as error:  # blocks or brackets nested beyond what Jinja's and Python's compilers take
            raise ModelError(f"{name}: cannot be compiled ({type(error).__name__}: {one_line(error)})") from None
        special = [token for token, i in tokenizer.added.items() if i in tokenizer.special_ids]
        self._any_token = _pattern(tokenizer.added)
        self._special_token = _pattern(special)

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The chat template of a container folder; ModelError that says so where there is none."""
        folder = Path(folder)
        sources = template_sources(folder)
        if sources.used is None or sources.text is None:
            raise ModelError(
                f"{folder} has no chat template ({FILE_NAME}, or chat_template in {CONFIG_NAME}), so it cannot chat; "
                "plain completion works (coli run --raw)"
            )
        config = read_json_if_present(folder / CONFIG_NAME)
        tokens = {}
        for key in _TOKEN_NAMES:
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[key] = token
        return cls(sources.text, tokenizer, name=str(folder / sources.used), tokens=tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a conversation.

        messages : as clients of the chat API send them; `normalise_messages` says what is done to them.
        enable_thinking, preserve_thinking : handed to the template where not None.
        variables : a client's further template arguments; what the template does not read has no effect.
        Raises RequestError naming the message and field, or with the template's own words where it refuses.
        """
        given = dict(variables or {})
        for name in _RESERVED:
            if name in given:
                raise RequestError(f"{name} cannot be set as a template argument", param="chat_template_kwargs")
        for name, value in (("enable_thinking", enable_thinking), ("preserve_thinking", preserve_thinking)):
            if value is not None:
                given[name] = value
        turns, offered = normalise_messages(messages), check_tools(tools)

        def run(replace: Callable[[Any, str], Any]) -> str:
            return self._run(
                {
                    **self._tokens,
                    **replace(given, "system"),
                    "messages": [replace(turn, turn["role"]) for turn in turns],
                    "tools": replace(offered, "system"),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )

        text = run(lambda value, role: value)
        try:
            if self._any_token is not None and _mentions(self._any_token, [turns, offered, given]):
                ids = self._encode_guarded(text, run, self._any_token)
            else:
                ids = self._tokenizer.encode(text, special=True)
        except RecursionError:
            raise RequestError("a message or tool is nested too deeply", param="messages") from None
        return Prompt(text, ids, thinking_of_prompt(text))

    def _encode_guarded(
        self, text: str, run: Callable[[Callable[[Any, str], Any]], str], any_token: re.Pattern[str]
    ) -> list[int]:
        """Ids of the rendered ``text`` of which only what the template itself wrote becomes control tokens."""
        stand_ins = _StandIns(self._tokenizer.added, avoid=text)

        def marked_in(roles: tuple[str, ...]) -> str:
            def mark(value: Any, role: str) -> Any:
                return _map_strings(value, any_token if role in roles else self._special_token, stand_ins)

            return run(mark)

        # First every added token in the turns of others, then, for a template that reads those, control tokens only.
        for roles in (_TYPED_BY_OTHERS, ()):
            marked = marked_in(roles)
            if stand_ins.restore(marked) == text:
                break
        else:
            raise RequestError(
                "a message spells out a control token that this model's chat template reads itself; "
                "break the token up, for example by a space",
                param="messages",
            )
        ids: list[int] = []
        at = 0
        for match in any_token.finditer(marked):
            ids += self._tokenizer.encode(stand_ins.restore(marked[at : match.start()]))
            ids.append(self._tokenizer.added[match[0]])
            at = match.end()
        return ids + self._tokenizer.encode(stand_ins.restore(marked[at:]))

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:  # raise_exception, an undefined name, a sandbox violation
            raise RequestError(
                f"the chat template refused the conversation: {one_line(error)}", param="messages"
            ) from None
        except Exception as error:  # a template is a program of the checkpoint's: what it does with odd input is open
            raise RequestError(
                f"the chat template cannot render this conversation ({type(error).__name__}: {one_line(error)})",
                param="messages",
            ) from None
        if len(text) > _LONGEST_TEXT:
            raise RequestError(
                f"the chat template makes {len(text):,} characters of this conversation; at most {_LONGEST_TEXT:,} are "
                "taken",
                param="messages",
            )
        return text


class _StandIns:
    """One private-use character for each added token, none of which occurs in the text at hand."""

    def __init__(self, tokens: Iterable[str], *, avoid: str) -> None:
        used = set(avoid)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self._of_token = dict(zip(tokens, free, strict=False))
        self._of_char = {char: token for token, char in self._of_token.items()}
        self._chars = re.compile(f"[{''.join(self._of_char)}]")

    def mark(self, pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda match: self._of_token[match[0]], text)

    def restore(self, text: str) -> str:
        return self._chars.sub(lambda match: self._of_char[match[0]], text)


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of ``tokens``, the longest where several begin at one place; None for none."""
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _mentions(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(_mentions(pattern, key) or _mentions(pattern, item) for key, item in value.items())
    return isinstance(value, (list, tuple)) and any(_mentions(pattern, item) for item in value)


def _map_strings(value: Any, pattern: re.Pattern[str] | None, stand_ins: _StandIns) -> Any:
    """``value`` with the tokens in all its strings, keys too, replaced by their stand-ins."""
    if pattern is None:
        return value
    if isinstance(value, str):
        return stand_ins.mark(pattern, value)
    if isinstance(value, Mapping):
        return {_map_strings(k, pattern, stand_ins): _map_strings(v, pattern, stand_ins) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, pattern, stand_ins) for item in value]
    return value


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The surroundings that chat templates are written for: those of transformers' apply_chat_template."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML, which a prompt is not
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
