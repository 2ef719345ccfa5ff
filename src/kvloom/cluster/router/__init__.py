"""The router: one OpenAI endpoint over many workers.

command.py          `kvloom route`
application.py      the HTTP application
call.py             Call: one request of a client
proxy.py            Proxy: chooses a worker for each request, and forwards the request and its answer
worker_client.py    the HTTP client that forwards requests
answer_stream.py    AnswerStream: one streamed answer, which another worker may continue
fleet.py            Fleet: the workers, their health and their models
fleet_index.py      which worker has which blocks, and in which medium
fleet_state.py      the data of the fleet page
prompt_keys.py      the block hashes of a prompt
text_tokenizer.py   tokenises texts in the router
scoring.py          chooses a worker, mainly by the expected time to first token
objectives.py       finds the workers that can meet the objective of a request
encoders.py         chooses the encode worker for the images of a request
fair_queue.py       FairQueue: admits requests of tenants in turn
replication.py      copies hot prefixes to further workers
"""

from .fleet_index import FleetIndex, Group
from .scoring import Choice, Scorer, ScoringOptions, SpeedModel, WorkerLoad

__all__ = [
    "Choice",
    "FleetIndex",
    "Group",
    "Scorer",
    "ScoringOptions",
    "SpeedModel",
    "WorkerLoad",
]
