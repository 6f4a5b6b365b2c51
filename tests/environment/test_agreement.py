"""pyproject.toml, constraints.txt and environment.yml say the same thing."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rattler import Channel, MatchSpec, Subdir, solve

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_SPECS = [line for line in CONDA["dependencies"] if isinstance(line, str)]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRA_LINES = sum(PROJECT["optional-dependencies"].values(), [])
EXTRAS = [Requirement(line) for line in EXTRA_LINES]


def pinned_versions() -> dict[str, str]:
    """Name in lower case -> exact version, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): version for name, version in pins}


def conda_ranges() -> dict[str, SpecifierSet]:
    """Conda name -> the range environment.yml gives it (empty: any version)."""
    parts = [line.partition(" ") for line in CONDA_SPECS]
    return {name: SpecifierSet(rest) for name, _, rest in parts}


def test_conda_asks_for_the_same_ranges_as_pip():
    expected = {CONDA_NAMES.get(r.name, r.name): r.specifier for r in RUNTIME}
    expected |= {"python": SpecifierSet(PROJECT["requires-python"]), "pip": SpecifierSet()}
    assert conda_ranges() == expected


def test_conda_uses_conda_forge_alone_and_then_installs_this_folder():
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert [line for line in CONDA["dependencies"] if isinstance(line, dict)] == [{"pip": ["-e ."]}]


@pytest.mark.parametrize("requirement", RUNTIME + EXTRAS, ids=lambda r: r.name)
def test_every_dependency_has_a_tested_version_within_its_range(requirement):
    version = pinned_versions().get(requirement.name)
    assert version is not None, f"constraints.txt does not pin {requirement.name}"
    assert version in requirement.specifier


def test_every_dependency_is_listed_once():
    names = [r.name for r in RUNTIME + EXTRAS]
    assert len(names) == len(set(names))


def test_constraints_are_exact_versions_that_fit_every_build():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"(#.*|[A-Za-z0-9_-]+==[0-9][0-9a-z.]*)?", line), line


def channel_with(folder: Path, versions: dict[str, str]) -> Channel:
    """A conda channel on disk that offers exactly these packages and nothing else."""
    packages = {f"{n}-{v}-0.tar.bz2": package_record(n, v) for n, v in versions.items()}
    for subdir, offered in (("noarch", packages), ("linux-64", {})):
        (folder / subdir).mkdir(parents=True)
        repodata = {"info": {"subdir": subdir}, "packages": offered, "packages.conda": {}}
        (folder / subdir / "repodata.json").write_text(json.dumps(repodata))
    return Channel(folder.as_uri())


def package_record(name: str, version: str) -> dict[str, object]:
    """What a channel's index says of one package."""
    checksums = {"md5": "0" * 32, "sha256": "0" * 64, "size": 1}
    build = {"build": "0", "build_number": 0, "depends": [], "subdir": "noarch"}
    return {"name": name, "version": version, **build, **checksums}


def solve_environment(channel: Channel) -> dict[str, str]:
    """What a conda solver picks for environment.yml from this channel, without a network."""
    specs = [MatchSpec(line) for line in CONDA_SPECS]
    subdirs = [Subdir("linux-64"), Subdir("noarch")]
    records = asyncio.run(solve([channel], specs, platforms=subdirs))
    return {record.name.normalized: str(record.version) for record in records}


def conda_offer() -> dict[str, str]:
    """The tested versions under conda's names, with a Python and a pip beside them."""
    pins = pinned_versions()
    tested = {CONDA_NAMES.get(r.name, r.name): pins[r.name] for r in RUNTIME}
    return {"python": "3.11.9", "pip": "25.0", **tested}


def test_a_conda_solver_accepts_the_tested_versions(tmp_path):
    offered = conda_offer()
    assert solve_environment(channel_with(tmp_path, offered)) == offered


def test_a_conda_solver_refuses_a_torch_that_is_too_old(tmp_path):
    offered = conda_offer() | {"pytorch": "2.12.1"}
    with pytest.raises(Exception, match="pytorch"):
        solve_environment(channel_with(tmp_path, offered))
