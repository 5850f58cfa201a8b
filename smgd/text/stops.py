"""Stop strings, found in text that arrives in pieces of any size.

An Aho-Corasick automaton over all strings at once: each character is looked at once, a few dict
accesses at most on average, however many strings there are and however they overlap. Its state is
the longest end of the text so far that begins a stop string. That end, and nothing more, is held
back; since it is a prefix of a known string, it is not even stored.

Which stop wins is vLLM's rule (0.32, `check_stop_strings`): the one whose *end* comes first in the
text, and of those that end together the one listed first. It is what matching after every single
character would give, hence the same for every way of cutting the text. vLLM 0.27 took the first
in the list that occurs in one engine output at all, which made the result depend on batching.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

_NO_STOP = -1


class Automaton:
    """The strings as a trie with suffix links; nodes are numbers, 0 is the root.

    `follow` are the children by character, `suffix` the longest other node that ends the same,
    `depth` the length of a node's text, of which `source` is a stop string that starts with it,
    and `stop` the index of the stop string that ends at a node, or -1.
    """

    __slots__ = ("depth", "follow", "source", "stop", "strings", "suffix")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.follow: list[dict[str, int]] = [{}]
        self.suffix = [0]
        self.depth = [0]
        self.source = [""]
        self.stop = [_NO_STOP]
        for index, text in enumerate(strings):
            self._add(index, text)
        self._link()

    def _add(self, index: int, text: str) -> None:
        node = 0
        for depth, char in enumerate(text, 1):
            child = self.follow[node].get(char)
            if child is None:
                child = self.follow[node][char] = len(self.follow)
                self.follow.append({})
                self.suffix.append(0)
                self.depth.append(depth)
                self.source.append(text)
                self.stop.append(_NO_STOP)
            node = child
        if text and self.stop[node] == _NO_STOP:
            self.stop[node] = index

    def _link(self) -> None:
        """Set suffix links, breadth first; a node inherits the stop that ends at its suffix."""
        queue = deque(self.follow[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.follow[node].items():
                self.suffix[child] = suffix = self.step(self.suffix[node], char)
                own, inherited = self.stop[child], self.stop[suffix]
                if inherited != _NO_STOP and not 0 <= own < inherited:
                    self.stop[child] = inherited
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """Return the node for a text that ends at `node` and goes on with `char`."""
        follow = self.follow
        child = follow[node].get(char)
        while child is None and node:
            node = self.suffix[node]
            child = follow[node].get(char)
        return child or 0


@lru_cache(maxsize=16)
def automaton(strings: tuple[str, ...]) -> Automaton:
    """Return the automaton of some strings; all choices of a request and many requests share it."""
    return Automaton(strings)


class StopMatcher:
    """Looks for stop strings in one text; `matched` is the one found, and then all is over.

    With `include_in_output` the text is kept up to the end of the match, so nothing is ever held
    back; otherwise it ends where the match starts. While `active` is false no match counts, which
    is how `min_tokens` works: in vLLM a stop string counts only if it ends in the text of a later
    token than the first `min_tokens`. It may begin before.
    """

    __slots__ = ("_auto", "_include", "_node", "_starts", "active", "matched")

    def __init__(self, strings: tuple[str, ...], include_in_output: bool = False) -> None:
        self._auto = automaton(strings)
        self._starts = self._auto.follow[0].keys()
        self._include = include_in_output
        self._node = 0
        self.active = True
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take text; return what may be shown now, and the stop string if it was completed."""
        if not self._node and self._starts.isdisjoint(text):
            return (text if self.matched is None else ""), None
        if self.matched is not None:
            return "", None
        before = self._node
        end, stop = self._scan(text)
        if stop is None:
            return self._between(before, text, self._held(self._node)), None
        self.matched = stop
        return self._between(before, text[:end], 0 if self._include else len(stop)), stop

    def finish(self) -> str:
        """Return what was held back: the text is over, or something comes that is no text."""
        released = self._between(self._node, "", 0)
        self._node = 0
        return released

    def _scan(self, text: str) -> tuple[int, str | None]:
        """Move through `text` as far as a match; return where that is and what was matched."""
        auto = self._auto
        step, stop, node = auto.step, auto.stop, self._node
        for position, char in enumerate(text, 1):
            node = step(node, char)
            if stop[node] == _NO_STOP:
                continue
            if self.active:
                self._node = 0
                return position, auto.strings[stop[node]]
            while node and not auto.follow[node]:  # complete: it can no longer become a stop
                node = auto.suffix[node]
        self._node = node
        return len(text), None

    def _held(self, node: int) -> int:
        return 0 if self._include else self._auto.depth[node]

    def _between(self, before: int, text: str, after: int) -> str:
        """Return what was held at `before`, then `text`, without the last `after` characters."""
        held = self._held(before)
        end = held + len(text) - after
        if end <= held:
            return self._auto.source[before][:end]
        return self._auto.source[before][:held] + text[: end - held]
