"""A stand-in for an accelerator, so that a machine without one can tell a tensor on the wrong device.

`device` builds and registers the device type "standin"; `plugin` puts the trainers of `tests.support.tiny` on it.
"""
