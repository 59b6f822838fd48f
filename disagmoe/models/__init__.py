"""Models for one device: torchtitan's definitions, cut into attention and expert parts."""

from disagmoe.models.titan import prepare_torchtitan

# Before any module of this package imports a torchtitan model: they copy the device type on import.
prepare_torchtitan()
