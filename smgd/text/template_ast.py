"""What a chat template does with a message's content, read from its syntax tree.

Names are followed, not scopes: a name that anywhere holds the messages, one message or a message's
content counts as that everywhere. That is what vLLM does too, it is cheap, and it errs only for
templates that use one name for two things.

Followed are loops over the messages, indexing and slicing, assignments, and macros whose arguments
are a message's content. Templates "loop over the parts" if they iterate over content, or read a key
of an indexed part; merely assigning content or testing its type says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from jinja2 import nodes

# Filters that give back a list of the same things, or the thing itself.
_PASSING_FILTERS = frozenset({"list", "selectattr", "rejectattr", "reverse", "sort", "default"})
_LOOPING_FILTERS = frozenset({"map", "selectattr", "rejectattr"})


class ContentUse(msgspec.Struct, frozen=True):
    """How a template treats content.

    `reads_parts`: it goes through a list of parts. `tests_string`: it asks whether content is a
    string, so a template that reads parts takes strings too. `tests_none`: it tells null from "".
    """

    reads_parts: bool
    tests_string: bool
    tests_none: bool


def content_use(root: nodes.Template) -> ContentUse:
    """Return how a parsed template treats the content of messages."""
    names = _Names(root)
    tests = {test.name for test in root.find_all(nodes.Test) if names.is_content(test.node)}
    return ContentUse(
        reads_parts=any(names.is_content(node) for node in _walked(root)),
        tests_string="string" in tests,
        tests_none="none" in tests,
    )


def _walked(root: nodes.Template) -> Iterator[nodes.Node]:
    """Yield every expression that is iterated over, or of whose items a key is read."""
    for loop in root.find_all(nodes.For):
        yield loop.iter
    for call in root.find_all(nodes.Filter):
        if call.name in _LOOPING_FILTERS and call.node is not None:
            yield call.node
    for part in _keyed(root):
        if isinstance(part, nodes.Getitem) and isinstance(_constant(part.arg), int):
            yield part.node


def _keyed(root: nodes.Template) -> Iterator[nodes.Node]:
    """Yield every expression of which a named key is read."""
    for access in root.find_all(nodes.Getattr):
        yield access.node
    for item in root.find_all(nodes.Getitem):
        if isinstance(_constant(item.arg), str):
            yield item.node


def _constant(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None


class _Names:
    """The names that hold messages, a message or content, found by following assignments."""

    def __init__(self, root: nodes.Template) -> None:
        self._messages = {"messages"}
        self._message: set[str] = set()
        self._content: set[str] = set()
        bindings = list(_bindings(root))
        known = -1
        while known != self._count():  # until a round finds no new name
            known = self._count()
            for name, value, is_item in bindings:
                self._bind(name, value, is_item)

    def _count(self) -> int:
        return len(self._messages) + len(self._message) + len(self._content)

    def _bind(self, name: str, value: nodes.Node, is_item: bool) -> None:
        if self.is_messages(value):
            (self._message if is_item else self._messages).add(name)
        elif self.is_message(value) and not is_item:
            self._message.add(name)
        elif self.is_content(value) and not is_item:
            self._content.add(name)

    def is_messages(self, node: nodes.Node) -> bool:
        """Tell whether an expression is the messages, or some of them."""
        if isinstance(node, nodes.Name):
            return node.name in self._messages
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Slice) and self.is_messages(node.node)
        return any(self.is_messages(inner) for inner in _same(node))

    def is_message(self, node: nodes.Node) -> bool:
        """Tell whether an expression is one message."""
        if isinstance(node, nodes.Name):
            return node.name in self._message
        if isinstance(node, nodes.Getitem):
            return not isinstance(node.arg, nodes.Slice) and self.is_messages(node.node)
        if isinstance(node, nodes.Filter) and node.name in {"first", "last"}:
            return node.node is not None and self.is_messages(node.node)
        return any(self.is_message(inner) for inner in _same(node))

    def is_content(self, node: nodes.Node) -> bool:
        """Tell whether an expression is a message's content, or some of its parts."""
        if isinstance(node, nodes.Name):
            return node.name in self._content
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and self.is_message(node.node)
        if isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Slice):
                return self.is_content(node.node)
            return _constant(node.arg) == "content" and self.is_message(node.node)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            got = node.node.attr == "get" and node.args and _constant(node.args[0]) == "content"
            return bool(got) and self.is_message(node.node.node)
        return any(self.is_content(inner) for inner in _same(node))


def _same(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the expressions whose value an expression may have."""
    if isinstance(node, nodes.Filter) and node.name in _PASSING_FILTERS and node.node is not None:
        yield node.node
    elif isinstance(node, nodes.CondExpr):
        yield node.expr1
        if node.expr2 is not None:
            yield node.expr2
    elif isinstance(node, (nodes.Or, nodes.And, nodes.Add)):
        yield node.left
        yield node.right


def _bindings(root: nodes.Template) -> Iterator[tuple[str, nodes.Node, bool]]:
    """Yield name, value, and whether the name takes the items of the value in turn."""
    for assign in root.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node, False
    for loop in root.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter, True
    macros = {macro.name: macro for macro in root.find_all(nodes.Macro)}
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            for parameter, value in zip(macros[call.node.name].args, call.args, strict=False):
                yield parameter.name, value, False
            for keyword in call.kwargs:
                yield keyword.key, keyword.value, False
