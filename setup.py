"""Build entry. The package is pure Python; `csrc/README.md` says what will be compiled here."""

from setuptools import setup

setup()
