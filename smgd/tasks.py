"""The daemon's tasks as a tree, for somebody who asks what a daemon waits for (SIGUSR1).

Every task has an owner, so the tree from trio's root has them all; each is shown by its name and by
the line at which it waits.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import trio

log = structlog.get_logger(__name__)

# Of thousands of requests the first tell what the others do, and a log line costs the loop time.
MAX_LINES = 500


def dump() -> None:
    """Write the tree to the log, a line for each task, at most `MAX_LINES`."""
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else list(_tree(root, 0))
    for depth, task in tasks[:MAX_LINES]:
        log.warning("task", depth=depth, name=task.name, at=_place(task))
    log.warning("tasks dumped", tasks=len(tasks), shown=min(len(tasks), MAX_LINES))


def _tree(task: trio.lowlevel.Task, depth: int) -> Iterator[tuple[int, trio.lowlevel.Task]]:
    waiting = [(depth, task)]
    while waiting:
        depth, task = waiting.pop()
        yield depth, task
        children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        children.sort(key=lambda child: child.name, reverse=True)
        waiting += [(depth + 1, child) for child in children]


def _place(task: trio.lowlevel.Task) -> str:
    """Return the innermost line at which a task waits, that is not trio's if there is one."""
    places = [
        (frame.f_globals.get("__name__", "?"), number, frame.f_code.co_name)
        for frame, number in task.iter_await_frames()
    ]
    others = [place for place in places if not place[0].startswith("trio.")]
    for module, number, name in (others or places)[-1:]:
        return f"{module}:{number} {name}"
    return ""
