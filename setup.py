"""What pyproject.toml cannot say: packages are found, and those of the folder lowering/ are parts of kvpass."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["kvpass", "kvpass.*"]),
        *(f"kvpass.{name}" for name in find_packages(include=["lowering", "lowering.*"])),
    ],
    package_dir={"kvpass.lowering": "lowering"},
)
