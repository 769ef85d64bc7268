"""The package's metadata. pyproject.toml holds the build system and the tools' settings only."""

import hashlib
import platform
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent


def version() -> str:
    """The version in fuselayers/_version.py, read as text: importing the package would need torch at build time."""
    text = (HERE / "fuselayers" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    assert found is not None, 'fuselayers/_version.py must hold the line __version__ = "..."'
    return found.group(1)


# The kernels for a CPU are C++ with a C interface: one wheel serves every Python, and building needs no torch. Each
# instruction set has a library of its own; `ops/cpu/library.py` loads the one whose instructions torch itself uses.
CPU = HERE / "fuselayers" / "ops" / "cpu"
FLAGS = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"plain": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {
        "avx2": [*AVX2, "-DCPU_CAPABILITY_AVX2"],
        "avx512": [*AVX512, "-DCPU_CAPABILITY_AVX512"],
    }


def cpu_libraries() -> list[Extension]:
    """One library for each instruction set; without a C++ compiler the installation goes on, and plain torch serves."""
    sources = sorted([*CPU.glob("*.cpp"), *CPU.glob("*.h")])
    name = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    return [
        Extension(
            f"fuselayers.ops.cpu._{name_of_set}",
            [str(path.relative_to(HERE)) for path in sources if path.suffix == ".cpp"],
            depends=["setup.py", *(str(path.relative_to(HERE)) for path in sources)],
            extra_compile_args=[*FLAGS, *flags, f'-DSOURCES="{name}"'],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
        for name_of_set, flags in INSTRUCTION_SETS.items()
    ]


class BuildLibraries(build_ext):
    """Each library's object files in a folder of its own, since they have the same names; so one after the other."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = None

    def build_extension(self, ext: Extension) -> None:
        shared, self.build_temp = self.build_temp, f"{self.build_temp}/{ext.name}"
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


setup(
    name="fuselayers",
    version=version(),
    description="Fused transformer layers for PyTorch: build them from config, swap them, or import them",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the fuselayers authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords="pytorch transformer fusion activation-checkpointing inductor triton",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.14",
    # Lower bounds, not pins: a torch that is already installed stays. The pins we develop with are in constraints.txt.
    # Hydra brings OmegaConf and PyYAML, in versions that it can use, and torch brings typing-extensions. torch
    # writes the checkpoints of `train` with safetensors.
    install_requires=[
        "torch>=2.12",
        'triton>=3.6; platform_system == "Linux"',
        "hydra-core>=1.3,<1.4",
        "numpy>=1.26",
        "rich>=13",
        "safetensors>=0.4.3",
    ],
    extras_require={
        # For the picture of a run.
        "plots": ["matplotlib>=3.8"],
        # For from_pretrained.
        "hub": ["huggingface_hub>=0.34"],
        # For `train.log=[tensorboard]`.
        "tensorboard": ["tensorboard>=2.14"],
        # setuptools: the tests build a wheel and an sdist without a network. transformers: what the shipped models are
        # compared with; it brings what the extra "hub" asks for. expecttest: PyTorch's databases of
        # ops and modules import it. hypothesis: tests/fuzz. accelerate, peft: what swapped models are used with.
        # cloudpickle: how joblib and Ray send functions.
        "test": [
            "accelerate>=1.10",
            "cloudpickle>=3",
            "expecttest",
            "hypothesis>=6.100",
            "matplotlib>=3.8",
            "networkx>=3.2",
            "peft>=0.18",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "mypy",
            "setuptools>=77.0.3",
            "tensorboard>=2.14",
            "transformers>=5.20",
            "types-networkx",
            "types-PyYAML",
        ],
        # Apart from "test": torchvision, which it needs, has CUDA code in its wheels on PyPI, and breaks the import of
        # transformers beside a torch for the CPU alone.
        "timm": ["timm>=1.0.20"],
        "docs": ["furo", "myst-parser", "sphinx", "sphinx-copybutton"],
    },
    packages=find_packages(include=["fuselayers", "fuselayers.*"]),
    package_data={
        "fuselayers": [
            "py.typed",
            "ops/cpu/*.cpp",
            "ops/cpu/*.h",
            "configs/groups/*.yaml",
            "configs/groups/**/*.yaml",
        ]
    },
    ext_modules=cpu_libraries(),
    cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    include_package_data=False,
    zip_safe=False,
    entry_points={
        "console_scripts": ["fuselayers = fuselayers.cli.main:main"],
        "torch_dynamo_backends": ["fuselayers = fuselayers.partition.dynamo_backend:fuselayers"],
    },
)
