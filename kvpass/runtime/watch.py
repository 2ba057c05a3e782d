"""Whether a model is still what it was when a step was captured: nobody looks at its guards when that is replayed."""

import weakref
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_address = methodcaller("data_ptr")


class Watch:
    """Looks at the modules of a model and at their weights: which objects they are, and where those lie. Not at other
    attributes, nor at hooks, which guards leave out, too."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._seen: _Held | None = None

    def changed(self) -> bool:
        """Whether there is something else than when it was asked last."""
        if self._seen is not None and self._seen.is_there:
            return False
        self._seen = _Held(self._model())
        return True


class _Held:
    """What the modules of a model hold."""

    def __init__(self, model: nn.Module):
        held: list[dict[str, Any]] = []
        for module in model.modules():
            held += module._modules, module._parameters, module._buffers
        self._held = [values for values in held if values]
        tensors = [*model.parameters(), *model.buffers()]
        self._plain = [tensor for tensor in tensors if not is_traceable_wrapper_subclass(tensor)]
        self._parts: dict[str, list[Tensor]] = {}  # tensor subclasses by the first of their parts, which is looked at
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                self._parts.setdefault(tensor.__tensor_flatten__()[0][0], []).append(tensor)
        self._objects, self._addresses = self._look()

    def _look(self) -> tuple[list, list[int]]:
        parts = (map(attrgetter(name), tensors) for name, tensors in self._parts.items())
        objects = chain(chain.from_iterable(values.values() for values in self._held), *parts)
        return list(objects), list(map(_address, self._plain))

    @property
    def is_there(self) -> bool:
        """Whether it still is, and nothing else."""
        objects, addresses = self._look()
        same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        return same and addresses == self._addresses
