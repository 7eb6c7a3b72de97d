"""The code of functions, found in the files of their modules. It never crosses: two processes compare digests of what each has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_SCALARS = (bool, int, float, str, type(None))


class ModuleCode:
    """Remembers what it found, for one process."""

    def __init__(self) -> None:
        self._by_module: dict[str, dict[str, CodeType]] = {}
        #: by the id of a code object, which is held so that its id stays its own
        self._digests: dict[int, tuple[CodeType, str]] = {}
        self._classes: dict[type, str] = {}

    def digest(self, code: CodeType) -> str:
        """Equal for equal code of the same line of a file, in every process of one Python."""
        if id(code) not in self._digests:
            self._digests[id(code)] = code, _hashed(_facts(code))
        return self._digests[id(code)][1]

    def class_digest(self, kind: type) -> str:
        """Of all methods that a class has or inherits from other classes of Python."""
        if kind not in self._classes:
            methods = {(base.__qualname__, name): self.digest(code) for base in kind.__mro__ for name, code in _methods(base)}
            self._classes[kind] = _hashed(sorted(methods.items()))
        return self._classes[kind]

    def find(self, module: ModuleType, digest: str) -> CodeType | None:
        """The code of this digest in the file of ``module`` as it is now, at any depth; None where it has none."""
        if module.__name__ not in self._by_module:
            self._by_module[module.__name__] = {self.digest(code): code for code in _code_of(module)}
        return self._by_module[module.__name__].get(digest)


def scalars_read(functions: list[FunctionType]) -> dict[str, dict[str, Any]]:
    """Numbers, texts and switches of their modules that functions read, and those that functions of the same file read for them.

    Returns:
        by module and name.
    """
    found: dict[str, dict[str, Any]] = {}
    waiting, seen = list(functions), set()
    while waiting:
        function = waiting.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        where = function.__globals__
        for name in {name for code in _nested(function.__code__) for name in code.co_names if name in where}:
            value = where[name]
            if type(value) in _SCALARS:
                found.setdefault(where["__name__"], {})[name] = value
            elif isinstance(value, FunctionType) and value.__globals__ is where:
                waiting.append(value)
            elif isinstance(value, type) and value.__module__ == where["__name__"]:
                waiting += methods_of(value)
    return found


def methods_of(kind: type) -> list[FunctionType]:
    """The functions that a class itself has."""
    plain = (getattr(value, "__func__", value) for value in vars(kind).values())
    return [value for value in plain if isinstance(value, FunctionType)]


def _methods(kind: type) -> list[tuple[str, CodeType]]:
    return [(function.__name__, function.__code__) for function in methods_of(kind)]


def _code_of(module: ModuleType) -> Iterator[CodeType]:
    spec = getattr(module, "__spec__", None)
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    if spec is None or get_code is None:
        return
    try:
        code = get_code(spec.name)
    except (ImportError, OSError, SyntaxError):
        return
    if code is not None:
        yield from _nested(code)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that lie in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _facts(code: CodeType) -> tuple[Any, ...]:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_firstlineno)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_name, counts, code.co_code, names, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _facts(value)
    if isinstance(value, frozenset):
        # its order is another one in each process
        return "frozenset", sorted(map(repr, value))
    return tuple(map(_constant, value)) if isinstance(value, tuple) else (type(value).__name__, repr(value))


def _hashed(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
