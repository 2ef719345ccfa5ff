"""Real processes under stress.

chaos.py   `make chaos`: kills, stops, partitions and spoiled disks
load.py    `make load`: thousands of open streams
"""
