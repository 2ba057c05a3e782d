"""Detect changes of a model between steps that nothing else checks.

Dynamo's guards ignore hooks. Where a step is called again without guards (`recall`, `replay`), the whole model is
checked here.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import chain
from operator import attrgetter, call, is_, itemgetter, methodcaller
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig

from ...models.recording import RECORDS

_address = methodcaller("data_ptr")
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_hooks_of = [itemgetter(name) for name in _HOOKS]
_GLOBAL_HOOKS = [getattr(every_module, f"_global{name}") for name in _HOOKS]
_CAPTURED = "torch.nn.utils.", RECORDS
"""Prefixes of modules whose hooks Dynamo can capture: they compute a weight (pruning, spectral norm) from attributes of
the module, or record outputs that the caller requested."""
_CONFIGS = PretrainedConfig, Namespace, SimpleNamespace
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_LONG = 1000  # containers with more elements are not searched


class Hooks:
    """The modules inside a model that have forward hooks or forward pre-hooks. Hooks of the model itself run around its
    forward and do not matter."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._tree = _Tree(model)

    def __call__(self) -> tuple[str, ...]:
        """The names of these modules. Hooks that Dynamo can capture do not count."""
        if not self._tree.is_there:
            self._tree = _Tree(self._model())
        inside = self._tree.inside
        if not any(_GLOBAL_HOOKS) and not any(any(map(hooks_of, inside)) for hooks_of in _hooks_of):
            return ()
        everywhere = ("every module",) if any(map(_opaque, _GLOBAL_HOOKS)) else ()
        named = ((name, vars(module)) for name, module in self._model().named_modules() if name)
        return *everywhere, *(name for name, own in named if any(_opaque(own[hooks]) for hooks in _HOOKS))


def _opaque(hooks: dict[int, Callable]) -> bool:
    """Whether any of ``hooks`` is one that Dynamo cannot capture."""
    return any(not str(getattr(hook, "__module__", "")).startswith(_CAPTURED) for hook in hooks.values())


class Watch:
    """Detects changes of a model.

    It compares the modules and the forward methods of their classes; the weights and their addresses; and other
    attributes of modules, including the contents of configs, dicts and lists. Objects of other classes are compared by
    identity.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._seen: _Held | None = None

    def changed(self) -> bool:
        """Whether anything has changed since the last call."""
        if self._seen is not None and self._seen.is_there:
            return False
        self._seen = _Held(self._model())
        return True


class _Tree:
    """The modules of a model. ``inside``: the attributes of all modules except the model itself."""

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self.inside = list(map(vars, modules[1:]))
        children = [module._modules for module in modules]
        self._parents, self._leaves = [each for each in children if each], [each for each in children if not each]
        self._children = self._look()

    def _look(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._parents)))

    @property
    def is_there(self) -> bool:
        """Whether the modules are unchanged."""
        return self._look() == self._children and not any(self._leaves)  # modules compare by identity


class _Held:
    """Everything that the modules of a model hold."""

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        tensors = [*model.parameters(), *model.buffers()]
        self._plain = [tensor for tensor in tensors if not is_traceable_wrapper_subclass(tensor)]
        self._parts: dict[str, list[Tensor]] = {}  # name of first inner tensor -> tensor subclasses
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                self._parts.setdefault(tensor.__tensor_flatten__()[0][0], []).append(tensor)
        self._types = list({type(module) for module in modules})
        held: Iterable[Any] = chain.from_iterable(
            (module._modules, module._parameters, module._buffers) for module in modules
        )
        self._dicts: list[dict] = [values for values in held if values]
        self._others: list[list | set] = []
        self._known: set[int] = set()
        self._attributes = [vars(module) for module in modules if type(module) is not nn.Linear]  # it reads none
        self._getters = list(map(self._getter, self._attributes))
        self._sized = [*map(vars, modules), *self._dicts, *self._others]
        self._objects, self._numbers = self._look()

    def _getter(self, attributes: dict[str, Any]) -> Callable[[dict[str, Any]], tuple]:
        """A function that gets those ``attributes`` of a module that not every module has. Containers among them are
        registered for comparison."""
        names = [name for name in attributes if name not in _OF_EVERY_MODULE]
        self._open(map(attributes.__getitem__, names))
        return itemgetter(*names, names[0])  # with a single name itemgetter would return no tuple

    def _open(self, values: Iterable) -> None:
        """Register the containers among ``values``, recursively."""
        for value in values:
            if isinstance(value, nn.Module) or id(value) in self._known:
                continue
            self._known.add(id(value))
            if isinstance(value, _CONFIGS) or (is_dataclass(value) and not isinstance(value, type)):
                value = getattr(value, "__dict__", {})
            if not isinstance(value, (dict, list, tuple, set)) or len(value) > _LONG:
                continue
            if isinstance(value, dict):
                self._dicts.append(value)
            elif not isinstance(value, tuple):
                self._others.append(value)
            self._open(value.values() if isinstance(value, dict) else value)

    def _look(self) -> tuple[list, list[int]]:
        parts = (map(attrgetter(name), tensors) for name, tensors in self._parts.items())
        values = chain.from_iterable(map(dict.values, self._dicts))
        attributes = chain.from_iterable(map(call, self._getters, self._attributes))
        forwards = map(attrgetter("forward"), self._types)
        objects = chain(values, attributes, forwards, chain.from_iterable(self._others), *parts)
        return list(objects), [*map(_address, self._plain), *map(len, self._sized)]

    @property
    def is_there(self) -> bool:
        """Whether everything is unchanged."""
        try:
            objects, numbers = self._look()
        except KeyError:  # an attribute is gone
            return False
        if numbers != self._numbers or len(objects) != len(self._objects):
            return False
        if not all(map(is_, objects, self._objects)):
            if not all(map(_same, objects, self._objects)):
                return False
            self._objects = objects
        return True


def _same(one: Any, other: Any) -> bool:
    """Whether a value that was assigned again equals the old one."""
    if one is other:
        return True
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and type(one) in _PLAIN and one == other
