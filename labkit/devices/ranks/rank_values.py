"""Carries values between the notebook and its ranks, as bytes in a file of the ranks' folder."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch


class _Portable(pickle.Pickler):
    """Pickles tensors as detached copies on the CPU, wherever they stand; parameters stay such."""

    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if hasattr(value, "to_local"):
            raise TypeError(
                "a DTensor is spread over the ranks: take .to_local(), or .full_tensor() on all"
            )
        # clone: pickling a view would carry the whole storage behind it
        copied = value.detach().cpu().clone()
        if isinstance(value, torch.nn.Parameter):  # a module's, which would train nothing without
            return torch.nn.Parameter, (copied, value.requires_grad)
        return copied.__reduce_ex__(self.proto)

    proto = pickle.HIGHEST_PROTOCOL


def dump(value: object, what: str) -> bytes:
    """Pickled bytes of a value; tensors detached and on the CPU, parameters still parameters.

    Raises:
        ValueError: something in it cannot be pickled; the message says ``what`` was asked.
    """
    buffer = io.BytesIO()
    try:
        _Portable(buffer, protocol=_Portable.proto).dump(value)
    except Exception as error:  # any object may refuse in its own way
        raise ValueError(
            f"{what}: a {type(value).__name__} that cannot be sent between processes ({error}); "
            "send plain values and tensors"
        ) from error
    return buffer.getvalue()


def load(file: Path, what: str) -> object:
    """Unpickle a file of ``dump`` and remove it.

    Raises:
        ValueError: it needs a class or function that is defined only where it was pickled.
    """
    try:
        return pickle.loads(file.read_bytes())
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"{what}: the value needs what is defined only on the other side ({error}); "
            "send plain values and tensors, or define it on both sides"
        ) from error
    finally:
        file.unlink(missing_ok=True)


def save(expression: str, file: str) -> None:
    """On a rank: evaluate an expression in its namespace into ``file``."""
    from IPython import get_ipython

    shell = get_ipython()
    value = eval(expression, shell.user_global_ns, shell.user_ns)
    Path(file).write_bytes(dump(value, f"pull({expression!r})"))


def define(file: str) -> None:
    """On a rank: define the variables that the notebook pushed."""
    from IPython import get_ipython

    get_ipython().push(pickle.loads(Path(file).read_bytes()))
