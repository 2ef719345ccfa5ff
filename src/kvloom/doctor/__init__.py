"""`kvloom doctor` reports what is installed, which hardware and kernels will be used, and what to repair.

| file        | content                                                                          |
|-------------|----------------------------------------------------------------------------------|
| problem.py  | a problem and its remedy                                                         |
| packages.py | packages and extras: versions, supported ranges, what each extra adds            |
| hardware.py | GPUs, native extensions, Triton, attention libraries                             |
| limits.py   | open files, locked memory, shared memory, free disk                              |
| command.py  | the command: collects the parts, prints tables or JSON                           |

The folder imports torch only if torch is installed. It imports attention libraries only on a machine with a GPU.
"""

__all__: list[str] = []
