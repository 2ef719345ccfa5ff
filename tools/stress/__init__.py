"""Real processes under stress.

chaos.py     `make chaos`: kills, stops, partitions and spoiled disks
load.py      `make load`: thousands of open streams
fairness.py  the time to first token of one tenant while another floods the server
fuzz.py      malformed and odd requests to a server and a router
"""
