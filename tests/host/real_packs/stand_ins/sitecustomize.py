"""Names that some packs import and this ComfyUI no longer has. Nothing calls them in the cases that are run."""

import importlib.abc
import importlib.machinery
import sys

#: module -> names
GONE = {"comfy.ldm.lightricks.model": ("precompute_freqs_cis", "interleaved_freqs_cis", "split_freqs_cis")}


class _WithGoneNames(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in GONE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            for gone in GONE[name]:
                if not hasattr(module, gone):
                    setattr(module, gone, _gone(gone))

        spec.loader.exec_module = exec_module
        return spec


def _gone(name):
    def missing(*args, **kwargs):
        raise NotImplementedError(f"this ComfyUI no longer has {name}")

    return missing


sys.meta_path.insert(0, _WithGoneNames())
