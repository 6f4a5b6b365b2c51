"""Gives a child process the scripted GPUs of the scenario file that its environment names."""

import os

if os.environ.get("FAKE_NVML"):
    import json
    from pathlib import Path

    import pynvml
    from fake_nvml import FakeNvml, Scenario

    pynvml.nvmlLib = FakeNvml(Scenario(**json.loads(Path(os.environ["FAKE_NVML"]).read_text())))
