"""HTTPS between client, router and worker, with certificates on both sides."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from kvloom.cli import main
from kvloom.serve.https import client_context, https_settings
from tests.cluster.fleet import Process, free_port, started, until
from tests.serve.certificates import certificate
from tests.serve.running import MODEL, model_folder

pytest.importorskip("cryptography", reason="the test makes certificates")


def ask(router: Process, tls: ssl.SSLContext | None, path: str, body: Any = None) -> tuple[int, Any]:
    url = router.url.replace("http:", "https:") if tls is not None else router.url
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(
            Request(url + path, data, {"content-type": "application/json"}), timeout=60, context=tls
        ) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


@pytest.mark.slow
def test_a_router_and_a_worker_check_each_others_certificates(tmp_path: Path) -> None:
    cert, key = map(str, certificate(tmp_path))
    served = ("--ssl-certfile", cert, "--ssl-keyfile", key)
    port, prompt = free_port(), {"model": MODEL, "prompt": "hi", "max_tokens": 3, "temperature": 0}
    url = f"https://127.0.0.1:{port}"
    worker = (
        "serve",
        str(model_folder(tmp_path)),
        "--name",
        MODEL,
        "--pool",
        "16MiB",
        "--quiet",
        "--threads",
        "1",
    )
    with (
        started(tmp_path / "worker.log", *worker, *served, "--ssl-ca-certs", cert, port=port),
        started(
            tmp_path / "router.log", "route", "--worker", url, *served, "--worker-ca-certs", cert,
            "--worker-certfile", cert, "--worker-keyfile", key,
        ) as router,
        started(tmp_path / "no.log", "route", "--worker", url, "--worker-ca-certs", cert, "--wait-seconds", "0") as anonymous,
        started(tmp_path / "distrusting.log", "route", "--worker", url, "--worker-certfile", cert, "--worker-keyfile", key, "--wait-seconds", "0") as distrusting,
    ):  # fmt: skip
        tls = ssl.create_default_context(cafile=cert)
        until(lambda: ask(router, tls, "/health")[0] == 200)
        status, answer = ask(router, tls, "/v1/completions", prompt)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 3
        assert ask(router, None, "/health")[0] == 0, "the router speaks HTTPS only"
        until(lambda: ask(anonymous, None, "/health")[0] == 503)
        assert ask(anonymous, None, "/v1/completions", prompt)[0] == 503, "the worker refuses it"
        assert ask(distrusting, None, "/v1/completions", prompt)[0] == 503, "it refuses the worker"


def test_files_that_tls_cannot_use_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = map(str, certificate(tmp_path))
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    assert https_settings(None, None, None) == {}
    assert https_settings(cert, key, cert)["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    with pytest.raises(ValueError, match=r"--ssl-certfile .* cannot be used"):
        https_settings(cert, None, None)
    with pytest.raises(ValueError, match=r"--ssl-ca-certs .* cannot be used"):
        https_settings(cert, key, str(wrong))
    with pytest.raises(ValueError, match="--worker-keyfile needs --worker-certfile"):
        client_context(None, None, key)
    with pytest.raises(ValueError, match=r"--worker-ca-certs .*: there is no such file"):
        client_context(str(tmp_path / "absent"))
    assert main(["route", "--worker", "https://127.0.0.1:9", "--ssl-keyfile", key, "--port", "0"]) == 2
    assert "need --ssl-certfile" in capsys.readouterr().err
    assert (
        main(["route", "--worker", "https://127.0.0.1:9", "--worker-ca-certs", str(wrong), "--port", "0"])
        == 2
    )
    assert "--worker-ca-certs" in capsys.readouterr().err
