"""The events of a run with their fields, from the calls that write them. What these do not tell is an error."""

from __future__ import annotations

import ast
import functools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.surface.sources import Sources, last_word, nodes_of, sources


def events() -> list[str]:
    """The fields that all events have, and those of each kind."""
    from tfdist.supervision.events import FILE_NAME, EventLog, EventStream

    with tempfile.TemporaryDirectory() as folder:
        EventLog(folder, "launcher").write("kind")
        (event,) = EventStream(Path(folder)).read()
    return [f"each line of {FILE_NAME}: {', '.join(event)}", *kinds(sources("EventLog", ".write("))]


def kinds(trees: Sources) -> list[str]:
    """The kinds of events, each with its own fields: a line for each set of fields that some call writes.

    Raises:
        ValueError: if the code does not tell what a call writes.

    Example:
        >>> kinds({"a.py": ast.parse("EventLog(folder, 'me').write('saved', step=3)")})
        ['saved: step']
    """
    logs = {name for tree in trees.values() for name in _names_of_logs(tree)}
    return sorted({line for path, tree in trees.items() for line in _File(path, tree).lines(logs)})


def _names_of_logs(tree: ast.Module) -> set[str]:
    """The last words of what an event log is called, such as `_events` of `self._events`."""
    names: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.arg) and node.annotation and _is_log(node.annotation):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _is_log(node.annotation):
            names.add(last_word(node.target))
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign) and (_is_log(node.value) or last_word(node.value) in names):
            names |= {*map(last_word, node.targets)}
    return names - {""}


def _is_log(node: ast.expr) -> bool:
    return any(last_word(below) == "EventLog" for below in ast.walk(node))


def _without_none(annotation: ast.expr) -> str:
    return ast.unparse(annotation).removesuffix(" | None")


class _File:
    """The calls in one file, and where what they write comes from."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path, self._nodes = path, nodes_of(tree)

    @functools.cached_property
    def _outer(self) -> dict[ast.AST, ast.AST]:
        return {below: node for node in self._nodes for below in ast.iter_child_nodes(node)}

    def lines(self, logs: set[str]) -> Iterator[str]:
        for node in self._nodes:
            if not (isinstance(node, ast.Attribute) and node.attr == "write"):
                continue
            if last_word(node.value) in logs or _is_log(node.value):
                call = self._outer[node]
                if not (isinstance(call, ast.Call) and call.func is node and len(call.args) == 1):
                    raise self._unclear(call, "a call with the kind of an event, and with its fields as keywords")
                fields = ", ".join(sorted(self._fields(call.keywords)))
                yield from (f"{kind}: {fields}" for kind in self._kinds(call.args[0]))

    def _kinds(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.IfExp):
            return [*self._kinds(node.body), *self._kinds(node.orelse)]
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        raise self._unclear(node, "the kind of an event as a text, for which no variable stands")

    def _fields(self, keywords: Iterable[ast.keyword]) -> Iterator[str]:
        for keyword in keywords:
            if keyword.arg is None:
                yield from self._keys(keyword.value)
            else:
                yield keyword.arg
                value = self._origin(keyword.value)
                if _is_asdict(value):
                    yield from (f"{keyword.arg}.{key}" for key in self._keys(value))

    def _keys(self, node: ast.expr) -> list[str]:
        """Of a dictionary, or of a dataclass that becomes one."""
        node = self._origin(node)
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return [key.value for key in node.keys if isinstance(key, ast.Constant)]
        if isinstance(node, ast.Call) and _is_asdict(node):
            made = self._origin(node.args[0])
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
                return self._fields_of_result(made.func)
        raise self._unclear(node, "a dictionary, or asdict() of what a method returns")

    def _origin(self, node: ast.expr) -> ast.expr:
        """What is assigned to a name in its function, or to an attribute in the file, if that happens once."""
        scope = self._nodes
        if isinstance(node, ast.Name):
            place: ast.AST = node
            while place in self._outer and not isinstance(place, ast.FunctionDef):
                place = self._outer[place]
            scope = nodes_of(place)
        elif not isinstance(node, ast.Attribute):
            return node
        text = ast.unparse(node)
        assigned = [
            other.value
            for other in scope
            if isinstance(other, ast.Assign) and text in [ast.unparse(target) for target in other.targets]
        ]
        return assigned[0] if len(assigned) == 1 else node

    def _fields_of_result(self, method: ast.Attribute) -> list[str]:
        """The fields of the dataclass that a method returns, of a class or of an attribute that is annotated."""
        owner = ast.unparse(method.value)
        for node in self._nodes:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == owner:
                owner = _without_none(node.annotation)
        for tree in sources(f"class {owner}").values():
            # The class that is returned stands beside the one that returns it.
            classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            for function in classes[owner].body if owner in classes else ():
                if isinstance(function, ast.FunctionDef) and function.name == method.attr and function.returns:
                    returned = classes[_without_none(function.returns)]
                    return [ast.unparse(field.target) for field in returned.body if isinstance(field, ast.AnnAssign)]
        raise self._unclear(method, "a method of a class that is known, which returns a dataclass of the same file")

    def _unclear(self, node: ast.AST, expected: str) -> ValueError:
        return ValueError(
            f"Received: `{ast.unparse(node)}` in {self._path}, line {node.lineno}. Expected: {expected}. "
            "Write it so, or teach tools/surface/events.py to read it."
        )


def _is_asdict(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "asdict"
