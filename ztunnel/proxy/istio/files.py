"""Checks, before the start, whether the proxy can use the TLS files named in its environment."""

from pathlib import Path

from xds.grpc.tls import client_tls
from ztunnel.proxy.identity.crl import CrlError, RevocationLists
from ztunnel.proxy.istio.certificates.credentials import CredentialsError, Endpoint, Roots
from ztunnel.proxy.istio.settings.config import ROOT_CERT, IstioConfig


class Findings:
    """The result of checking the files named in the environment.

    Attributes:
        faults, warnings: one line per finding, starting with the variable. A missing file is a warning, because
            the proxy waits for files that are mounted late.
        contexts: the number of TLS contexts that can be built.
    """

    def __init__(self, config: IstioConfig) -> None:
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.contexts = 0
        self._config = config
        self._roots("XDS_ROOT_CA", config.xds_address, config.alt_xds_hostname, config.xds_root_ca)
        self._roots("CA_ROOT_CA", config.ca_address, config.alt_ca_hostname, config.ca_root_ca)
        if config.crl_path:
            self._revocations(Path(config.crl_path))

    def _roots(self, variable: str, address: str, other_name: str, value: str) -> None:
        endpoint = Endpoint.parse(address) if address else None
        if endpoint is None or not endpoint.tls:
            return
        roots, policy = Roots(value), self._config.tls_policy
        if roots.kind == "File" and not Path(value).exists():
            self._absent(variable, f"{value} (the default)" if value == ROOT_CERT else value)
            return
        names = [endpoint.host, *filter(None, [other_name])]
        try:
            client_tls(roots.read(), names, tls_1_2=policy.tls_1_2, groups=policy.groups)
        except CredentialsError as error:
            self.faults.append(f"{variable}: {error}")
        except ValueError:  # the error's text is not used, because it refers to the library's manual
            self.faults.append(f"{variable}: {roots.place}: no certificate in PEM that can be read")
        else:
            self.contexts += 1

    def _revocations(self, path: Path) -> None:
        if not path.exists():
            self._absent("CRL_PATH", str(path))
            return
        try:
            RevocationLists.parse(path.read_bytes())
        except OSError as error:
            self.faults.append(f"CRL_PATH: {path}: cannot be read: {error.strerror}; every peer would be refused")
        except CrlError:
            self.faults.append(f"CRL_PATH: {path}: no certificate revocation list; every peer would be refused")

    def _absent(self, variable: str, path: str) -> None:
        self.warnings.append(f"{variable}: {path}: not there, and not checked")
