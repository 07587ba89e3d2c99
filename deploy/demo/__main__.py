"""Runs two nodes with seven pods, one control plane and one proxy per node, and shows each feature of the README.

Everything runs in network namespaces of this machine and is removed afterwards. Exit status 0 means that every
expectation was met.
"""

import argparse
import contextlib
import io
import os
import platform
import sys
import time
from collections.abc import Iterator

import hbone
from deploy.demo import policy
from deploy.demo.addons import AddonsDemo
from deploy.demo.folder import FolderTooDeep, demo_folder
from deploy.demo.inpod import InPodDemo
from deploy.demo.kube import KubeDemo, MissingPrograms, programs
from deploy.demo.node import NodeDemo
from deploy.demo.stage import Demo, Unexpected, print_logs
from deploy.demo.window import Window
from deploy.lab import Lab, become_root_of_own_namespaces
from tproxy.errors import TproxyError
from ztunnel import __version__

#: Seconds between two checks whether a demo that stays up was interrupted.
_LOOK_S = 0.5

MODES: dict[str, type[Demo]] = {"node": NodeDemo, "inpod": InPodDemo, "kube": KubeDemo, "addons": AddonsDemo}


@contextlib.contextmanager
def stage(mode: type[Demo], colour: bool, window: Window | None) -> Iterator[Demo]:
    """Yield the lab and a folder for its files; both are removed afterwards."""
    with demo_folder("ztunnel-demo-") as folder, Lab(mode.places) as lab:
        yield mode(lab, folder, colour, window)


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--mode",
        choices=(*MODES, "policy"),
        default="node",
        help="node: Envoy's dialect; inpod: today's Istio; kube: the same in a cluster, with a real API server; "
        "addons: Istio with the addons of examples/addons; "
        "policy: Calico's, beside Envoy (make demo MODE=policy)",
    )
    parser.add_argument("--keep", action="store_true", help="stay up afterwards (make demo KEEP=1)")
    args = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe gets each line when it is printed, as a terminal does
    try:
        if args.mode == "policy":
            return policy.main(keep=args.keep)
        if args.mode == "kube":
            programs()
        window = Window() if args.keep else None  # the port for a browser, opened in the initial namespace
        if window is not None:
            window.keep()
        become_root_of_own_namespaces()
        if window is not None:
            window.kept()
        began = time.monotonic()
        with stage(MODES[args.mode], sys.stdout.isatty(), window) as demo:
            print(f"ztunnel {__version__}, {hbone.build()}, Python {platform.python_version()}")
            print(f"Setting the stage: {demo.setting}")
            try:
                demo.start()
                print(f"  ready after {time.monotonic() - began:.1f} s")
                demo.play()
            except Unexpected as error:
                print(f"demo: {error}; logs follow", file=sys.stderr)
                print_logs(demo.folder)
                return 1
            failures = demo.failures
            print(
                f"\n{'Everything came out as expected.' if not failures else f'{failures} expectations failed.'}"
            )
            if args.keep:
                demo.explain()
                with contextlib.suppress(KeyboardInterrupt), demo.traffic():
                    while True:  # a single signal.pause() would miss a signal that arrived just before it
                        time.sleep(_LOOK_S)
        return 1 if failures else 0
    except (TproxyError, MissingPrograms, FolderTooDeep) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has ended, like `head` does. When Python exits, its own writes must not fail on
        # the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except KeyboardInterrupt:
        print("interrupted; everything is taken down", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
