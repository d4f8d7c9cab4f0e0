"""The errors that a user can meet. Each message names the patch, the target, the setting and the way out."""

from __future__ import annotations


class VerlFixesError(RuntimeError):
    """Base of every error that verl-fixes raises on purpose."""


class ToggleError(VerlFixesError):
    """An environment variable or an argument of ``activate()`` that names nothing we know."""


class StrictError(VerlFixesError):
    """VERL_FIXES_STRICT=1, and a patch is drifted or failed."""


class CatalogError(VerlFixesError):
    """Two patches have one name, or claim one target."""


class InstallError(VerlFixesError):
    """A wrapper could not be put in place; what was installed of its patch has been taken out again."""


class RestoreError(VerlFixesError):
    """Somebody wrapped one of our targets again, so the original cannot be put back without losing their wrapper."""


class UncountedError(VerlFixesError):
    """The number by which Megatron would divide every gradient is not known."""


class RoutesError(VerlFixesError):
    """MoE routes that are to be recorded or replayed are missing, incomplete or ambiguous."""


class UnsupportedSettingError(VerlFixesError, ValueError):
    """Verl settings that give wrong gradients or stop the run later. Also a ValueError, as upstream raises it."""
