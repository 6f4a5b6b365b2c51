"""The papermill engine ``labkit``: it ends in time, and what it saves is true.

What the stock engine gets wrong, and this one cures:

- it hangs on ``ipywidgets.Output`` (jupyter/nbclient#312): the reply is awaited in short slices;
- after a dead kernel or a time-out it saves every cell as completed, and ``sys.exit(0)`` is green;
- its kernel is whichever ``python3`` is registered: here it is always the running interpreter;
- endless printing fills the memory: a cell's text is capped while it arrives.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from time import monotonic
from uuid import uuid4

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.paths import jupyter_runtime_dir
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from papermill.log import logger

from labkit.lab.headless.compact import compact
from labkit.lab.headless.truth import code_cells, record_failure, save

SLICE_S = 0.5
INTERRUPT_GRACE_S = 5.0  # for a timed-out cell to stop by itself and show where it was
STREAM_LIMIT = 10_000_000  # characters of text kept from one cell while it runs


class TruthfulManager(NotebookExecutionManager):
    """Papermill's bookkeeping, saved atomically, in which a cell that did not run stays pending.

    ``on_cell(number, total)`` is called when the code cell ``number`` (from 1) of ``total`` starts.
    """

    def __init__(self, nb: NotebookNode, on_cell: Callable[[int, int], None], **settings):
        super().__init__(nb, progress_bar=False, **settings)
        self.on_cell = on_cell

    def save(self, **_) -> None:
        if self.output_path:
            save(self.nb, Path(self.output_path))
        self.last_save_time = self.now()

    def cell_start(self, cell, cell_index=None, **_) -> None:
        cells = code_cells(self.nb)
        for number, other in enumerate(cells, start=1):
            if other is cell:
                self.on_cell(number, len(cells))
        super().cell_start(cell, cell_index)

    def notebook_complete(self, **_) -> None:
        self.end_time = self.now()
        self.nb.metadata.papermill.update(
            end_time=self.end_time.isoformat(),
            duration=(self.end_time - self.start_time).total_seconds(),
        )
        compact(self.nb)
        self.save()


class LabClient(PapermillNotebookClient):
    """nbclient with deadlines, sliced waiting, capped text and failures written down."""

    def __init__(self, nb_man: TruthfulManager, notebook_timeout: float, **settings):
        super().__init__(nb_man, **settings)
        self.notebook_timeout_s = notebook_timeout
        self.deadline = monotonic() + notebook_timeout
        self._text_of_cell = 0

    def create_kernel_manager(self) -> AsyncKernelManager:
        """A kernel of the running interpreter: with no folders to search, only the native one."""
        folder = Path(jupyter_runtime_dir())
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.km = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            transport="ipc",  # sockets are files in a folder of ours: no ports, no other user
            connection_file=str(folder / f"k{uuid4().hex[:8]}.json"),
        )
        return self.km

    def execute(self, **settings) -> NotebookNode:
        self.reset_execution_trackers()
        with self.setup_kernel(**settings):
            if self.papermill_execute_cells():
                info = self.wait_for_reply(self.kc.kernel_info())
                self.nb.metadata["language_info"] = info["content"]["language_info"]
            self.set_widgets_metadata()
        return self.nb

    def papermill_execute_cells(self) -> bool:
        """Run the cells up to the first that fails; whether all ran."""
        for index, cell in enumerate(self.nb.cells):
            self._text_of_cell = 0
            self.nb_man.cell_start(cell, index)
            failed = self._failure_of(cell, index)
            if failed:
                record_failure(self.nb, *failed)
            self.nb_man.cell_complete(cell, cell_index=index)
            if failed:
                return False
        return True

    def _failure_of(self, cell: NotebookNode, index: int) -> tuple[str, str] | None:
        try:
            self.execute_cell(cell, index)
        except CellExecutionError as error:
            return error.ename, (error.evalue or "no message").splitlines()[0][:500]
        except CellTimeoutError as error:
            self.shutdown_kernel = "immediate"  # it does not listen
            return "CellTimeoutError", str(error)
        except DeadKernelError:
            return "DeadKernelError", self._death()
        return None

    def _death(self) -> str:
        code = self.km.provisioner.process.poll() if self.km.provisioner.process else None
        if code is None or code >= 0:
            return f"the kernel ended with exit status {code} while the cell ran"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the kernel was ended by {name} while the cell ran{hint}"

    def _own_limit(self, cell: NotebookNode | None) -> float:
        limit = self.timeout
        for tag in (cell or {}).get("metadata", {}).get("tags", []):
            if tag.startswith("timeout="):
                limit = float(tag.removeprefix("timeout="))
        return limit

    def _get_timeout(self, cell: NotebookNode | None) -> float | None:
        return max(0.1, min(self._own_limit(cell), self.deadline - monotonic()))

    async def _async_handle_timeout(self, timeout: float, cell: NotebookNode | None = None):
        """Interrupt, so that the traceback shows where the cell was; then give it up."""
        # by the limit that was given, not by the clock: a wait may end a moment before its time
        over = timeout < self._own_limit(cell)
        await self.km.interrupt_kernel()
        await asyncio.wait({self._outputs}, timeout=INTERRUPT_GRACE_S)
        if over:
            raise CellTimeoutError(f"the notebook's {self.notebook_timeout_s:g} s are over")
        raise CellTimeoutError(f"the cell ran longer than its {timeout:g} s")

    async def _async_poll_for_reply(self, msg_id, cell, timeout, outputs, alive):
        """As nbclient's, in slices: its Output widgets use the same socket and eat the wake-up."""
        self._outputs = outputs
        channel = self.kc.shell_channel
        whole = type(channel).get_msg

        async def sliced(timeout: float):
            end = monotonic() + timeout
            while True:
                left = end - monotonic()
                try:
                    return await whole(channel, timeout=max(0.0, min(SLICE_S, left)))
                except Empty:
                    if left <= SLICE_S:
                        raise

        channel.get_msg = sliced
        try:
            return await super()._async_poll_for_reply(msg_id, cell, timeout, outputs, alive)
        finally:
            del channel.get_msg

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "stream":
            self._text_of_cell += len(msg["content"]["text"])
            if self._text_of_cell > STREAM_LIMIT:
                keep = len(msg["content"]["text"]) - (self._text_of_cell - STREAM_LIMIT)
                if keep <= 0:
                    return None
                note = f"\n[more than {STREAM_LIMIT:,} characters: the rest was dropped]\n"
                msg["content"]["text"] = msg["content"]["text"][:keep] + note
        return super().process_message(msg, cell, cell_index)


class LabEngine(Engine):
    """Registered with papermill as ``labkit``."""

    @classmethod
    def execute_notebook(
        cls, nb, kernel_name, output_path=None, on_cell=lambda number, total: None, **settings
    ) -> NotebookNode:
        nb.metadata.pop("widgets", None)  # an earlier run's state and failure are not this one's
        nb.metadata.get("labkit", {}).pop("failure", None)
        manager = TruthfulManager(nb, on_cell, output_path=output_path, autosave_cell_every=5)
        manager.notebook_start()
        try:
            cls.execute_managed_notebook(manager, kernel_name, **settings)
        except Exception as error:  # such as a kernel that does not start
            logger.exception("the notebook could not be executed")
            record_failure(nb, type(error).__name__, str(error))
        finally:
            manager.notebook_complete()
        return nb

    @classmethod
    def execute_managed_notebook(
        cls, nb_man, kernel_name, execution_timeout=300, notebook_timeout=600, start_timeout=60, **_
    ) -> None:
        nb_man.nb.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
        }
        LabClient(
            nb_man,
            notebook_timeout,
            timeout=execution_timeout,
            startup_timeout=start_timeout,
            iopub_timeout=60,
            log=logger,
        ).execute()


papermill_engines.register("labkit", LabEngine)
