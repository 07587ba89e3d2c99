"""Runs addons (:mod:`ztunnel.addons`) for both front ends: loads, calls, times, suspends and replaces them.

:mod:`decide <ztunnel.proxy.addons.decide>`, :mod:`budget <ztunnel.proxy.addons.budget>`,
:mod:`settings <ztunnel.proxy.addons.settings>` and :mod:`options <ztunnel.proxy.addons.options>` decide and do no
input or output. :mod:`host <ztunnel.proxy.addons.host>` is the object that front ends call.
"""
