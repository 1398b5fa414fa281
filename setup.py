"""Puts the configs of experiments/ into a built package, as `fedjax_sim/examples`. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = sorted(path for pattern in ("*.toml", "*/*.toml") for path in Path("experiments").glob(pattern))


class BuildWithExamples(build_py):
    """The usual build, and the examples; an editable install reads them where they are (`config/read.py`)."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for path in CONFIGS:
            target = Path(self.build_lib, "fedjax_sim", "examples", *path.parts[1:])
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))

    def get_source_files(self) -> list[str]:
        """What a source distribution holds."""
        return [*super().get_source_files(), *map(str, CONFIGS)]


setup(cmdclass={"build_py": BuildWithExamples})
