"""Stands in for packages that SGLang imports everywhere and calls on a GPU only: any name can be imported from them, none can be used."""

import importlib.abc
import importlib.machinery
import sys
import types


class Missing:
    """A name of a package that is not installed; a call says so."""

    def __init__(self, path):
        self._path = path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._path}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._path} was called, but this environment serves on CPUs without it")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below one package."""

    def __init__(self, package):
        self._prefix = package + "."

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = names_of(spec.name)
        return module

    def exec_module(self, module):
        pass


def names_of(module):
    """A module-level `__getattr__` that knows every name."""
    return Missing(module).__getattr__


def stand_in(package):
    """Make the module that calls this a package of which everything can be imported."""
    sys.meta_path.append(_Submodules(package))
    module = sys.modules[package]
    module.__path__ = []
    module.__getattr__ = names_of(package)
