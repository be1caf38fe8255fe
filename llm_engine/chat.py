"""Messages to prompt text, by the model's own chat template.

The template is a program out of a model file, so it runs in Jinja's sandbox with a bound on its loops. What
users wrote never becomes control: each spelling of a control token in it is cut in two before rendering, and
the prompt is handed out in segments with a border at each cut.
Called by: `model.py`, which compiles the template, and the engine's `prepare`, on any thread.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import count, pairwise
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm_engine.errors import TemplateRefused
from llm_engine.generation import Message

# Marks where a control token's spelling was cut. A noncharacter: no text means anything by it, and where one
# is written all the same, it is one border more and in no segment.
_CUT = "\ufdd0"
# Loop turns and macro calls of one rendering: far above a long conversation's, half a second of work at most.
_MAX_TURNS = 100_000
# Not a name a template can write, so that none can reach its own counter.
_TURNS = "turns taken"
_SYSTEM_PROBE = "is-there-a-system-role"

_MERGED_ROLES = frozenset({"system", "user", "assistant"})

# What running a template can raise: it is a program, given values its author did not foresee.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One model's chat template, compiled once.

    A template that does not compile refuses every conversation, each time with the reason, because the model
    can still be loaded and used without one. Thread: any.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        control_spellings: Iterable[str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._constants = {
            "add_generation_prompt": True,
            "bos_token": bos,
            "eos_token": eos,
            "tools": None,
            "strftime_now": lambda format: now().strftime(format),
        }
        self._spellings = _Spellings(control_spellings)
        try:
            self._compiled: Template | None = _compile(source)
        except _TEMPLATE_FAULTS as error:
            self._compiled, self._fault = None, _reason(error)
        self._has_system_role = self._renders_system_role()

    def render(self, messages: Sequence[Message], think: bool) -> tuple[str, ...]:
        """The prompt in segments, to be tokenised one after another with special tokens parsed.

        Consecutive turns of one role become one. Where the template has no system role, its text comes before
        the first user turn's.
        Raises: TemplateRefused with the template's own reason.
        """
        try:
            turns = _merged(_with_roles_of(self._has_system_role, messages))
            text = self._text([self._spellings.cut_in_turn(turn) for turn in turns], think)
        except _TEMPLATE_FAULTS as error:
            raise TemplateRefused(f"the chat template refuses these messages: {_reason(error)}") from error
        segments = tuple(filter(None, text.split(_CUT)))
        if not segments:
            raise TemplateRefused("this model's chat template makes an empty prompt of these messages")
        return segments

    def _text(self, turns: Sequence[Message], think: bool) -> str:
        if self._compiled is None:
            raise TemplateRefused(f"this model has no usable chat template: {self._fault}")
        return self._compiled.render(
            {**self._constants, "messages": turns, "enable_thinking": think, _TURNS: count()}
        )

    def _renders_system_role(self) -> bool:
        probe = [{"role": "system", "content": _SYSTEM_PROBE}, {"role": "user", "content": "Hi"}]
        try:
            return _SYSTEM_PROBE in self._text(probe, False)
        except (TemplateRefused, *_TEMPLATE_FAULTS):
            return False


class _Spellings:
    """Cuts the spellings of control tokens in what users wrote. One of a single character cannot be cut."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._all = frozenset(spelling for spelling in spellings if len(spelling) > 1)
        lengths: dict[str, set[int]] = {}
        for spelling in self._all:
            lengths.setdefault(spelling[0], set()).add(len(spelling))
        self._lengths = lengths
        # A large vocabulary has thousands of them, but they start with one or two characters.
        self._start = re.compile(f"[{re.escape(''.join(lengths))}]" if lengths else "(?!)")

    def cut_in_turn(self, turn: Message) -> Message:
        """The turn with every string that a user may have written cut; its role is not one."""
        return {key: value if key == "role" else self._cut_in(value) for key, value in turn.items()}

    def _cut_in(self, value: Any) -> Any:
        match value:
            case str():
                return self._cut(value)
            case Mapping():
                return {self._cut_in(key): self._cut_in(item) for key, item in value.items()}
            case list() | tuple():
                return [self._cut_in(item) for item in value]
            case _:
                return value

    def _cut(self, text: str) -> str:
        """Cut each spelling after its first character: no two of them, however they overlap, stay whole."""
        cuts = [start + 1 for start in self._starts(text)]
        return _CUT.join(text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))

    def _starts(self, text: str) -> Iterable[int]:
        for found in self._start.finditer(text):
            start = found.start()
            if any(text[start : start + n] in self._all for n in self._lengths[found.group()]):
                yield start


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox as templates of model files expect it, without the one operator that can hang it."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> NoReturn:
        raise SecurityError("a chat template may not use powers")


class _GenerationTag(Extension):
    """`{% generation %}` marks what training counts; in a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.filters["tojson"] = _tojson
    sandbox.filters[_TURNS] = _take_turn
    tree = sandbox.parse(source)
    _count_turns(tree)
    tree.set_environment(sandbox)
    return Template.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))


def _count_turns(tree: nodes.Template) -> None:
    """Have each loop and macro of the template count its turns, those that a loop's condition skips too."""
    counted: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        counted += tree.find_all(kind)
    for node in counted:
        turn = nodes.Filter(nodes.Const(True), _TURNS, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(turn, node.test, lineno=node.lineno)


@pass_context
def _take_turn(context: Context, value: bool) -> bool:
    if next(context.parent[_TURNS]) >= _MAX_TURNS:
        raise SecurityError(f"the chat template takes more than {_MAX_TURNS} turns in its loops")
    return value


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in training: Jinja's own filter escapes for HTML and sorts the keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_roles_of(has_system_role: bool, messages: Sequence[Message]) -> list[Message]:
    """The messages in roles that the template has."""
    turns = [
        {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
    ]
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    if has_system_role or not system:
        return turns
    others = [turn for turn in turns if turn["role"] != "system"]
    first_user = next((place for place, turn in enumerate(others) if turn["role"] == "user"), 0)
    others.insert(first_user, {"role": "user", "content": _paragraphs(system)})
    return others


def _merged(turns: Iterable[Message]) -> list[Message]:
    """Consecutive turns of one role as one: most templates insist that roles alternate."""
    merged: list[Message] = []
    for turn in turns:
        if merged and _can_merge(merged[-1], turn):
            content = _paragraphs([merged[-1]["content"], turn["content"]])
            merged[-1] = {**merged[-1], **turn, "content": content}
        else:
            merged.append(turn)
    return merged


def _can_merge(first: Message, second: Message) -> bool:
    return (
        first["role"] == second["role"]
        and first["role"] in _MERGED_ROLES
        and all(
            isinstance(turn.get("content"), str) and not turn.get("tool_calls") for turn in (first, second)
        )
    )


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _reason(error: BaseException) -> str:
    said = error.message if isinstance(error, TemplateError) else str(error)
    return (said or type(error).__name__).replace(_CUT, "")
