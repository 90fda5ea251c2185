"""What composer needs of the operating system and of Python, and nothing of torch's graphs.

Fork safety (:mod:`~composer.system.forks`), exceptions that must pass
(:mod:`~composer.system.control_flow`), hardware and memory (:mod:`~composer.system.hardware`,
:mod:`~composer.system.memory`), installed versions (:mod:`~composer.system.distribution`), child
processes (:mod:`~composer.system.subprocesses`), the disk cache (:mod:`~composer.system.disk`), the
background thread (:mod:`~composer.system.background`), and warnings that are given once
(:mod:`~composer.system.warned`).
"""
