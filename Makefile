# Every target sets up what it needs: a virtual environment in .venv from the pinned lock file.
# A distribution's interpreter is built with profile-guided optimisation. Those of pyenv are not by default, and tests
# that compute take 1.4 times as long. It also has to have what the tests need: venv, and headers for the compiled build.
SYSTEM_PYTHON := /usr/bin/python3
COMPLETE := import ensurepip, os, sys, sysconfig; \
	sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PYTHON ?= $(shell $(SYSTEM_PYTHON) -c '$(COMPLETE)' 2>/dev/null && echo $(SYSTEM_PYTHON) || echo python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Go's own installer leaves it beside the PATH.
GO ?= $(firstword $(shell command -v go) $(wildcard /usr/local/go/bin/go $(HOME)/go/bin/go) go)
# More than two cores can keep busy, because some of them wait: tests/lanes.py.
WORKERS := --forks 4
# Tests start hundreds of processes: without stored bytecode each compiles its modules again.
unexport PYTHONDONTWRITEBYTECODE
NEEDS_GO = command -v $(GO) >/dev/null || { echo "make: this needs Go (https://go.dev/dl), or GO=/path/to/go" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: addons nightly wheels help demo test check unit life netns interop hostile handover soak faults audit mutants bench bench-start bench-instructions bench-idle bench-watched bench-scale bench-pushes bench-authz fuzz ops man proto promtool hubble helm bare lock clean setup compiled pure kube istiod test-kube netpol bench-netpol bench-enrol ui keepalive envoy-diff

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

$(STAMP): requirements/dev.lock requirements/rivals.lock pyproject.toml
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip --version >/dev/null 2>&1 || \
		{ echo "make: no pip in $(VENV): install the package python3-venv, rm -r $(VENV), and try again" >&2; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade --target $(VENV)/rivals -r requirements/rivals.lock
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup: $(STAMP) ## the virtual environment, from requirements/dev.lock

demo: $(STAMP) ## two nodes, captured pods, mTLS tunnels, one command; MODE=inpod as Istio has it, MODE=kube in a cluster, MODE=policy Calico's, MODE=addons; KEEP=1 stays up
	@$(if $(ADDON),ADDON=$(ADDON)) $(PY) -m deploy.demo $(if $(MODE),--mode $(MODE)) $(if $(filter-out 0 no false,$(KEEP)),--keep)

test: $(STAMP) ## every test: unit, real sockets, network namespaces, interop
	$(PY) -m pytest -q $(WORKERS)

# The files of the pure core that take longer than a second, most of its time. make test runs all of them.
LONG := $(addprefix --ignore=tests/,$(addprefix hbone/,test_work.py test_windows.py test_frame_pairs.py test_unit_price.py \
	test_tls_records.py test_hpack_pieces.py) xds/dialects/test_fields.py xds/grpc/test_connection.py \
	$(addprefix ztunnel/,control_plane/test_generate.py policy/calico/test_incremental.py policy/calico/test_parts.py \
	policy/netpol/test_table_builder.py proxy/istio/accounting/test_metrics_machine.py))

check: $(STAMP) ## format, lint, types, tests of the pure core but for its longest files: under a minute
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	@$(PY) -m mypy & types=$$!; $(PY) -m pytest -q --forks 2 --core $(LONG); tests=$$?; wait $$types && exit $$tests

unit: $(STAMP) ## all tests of one process: the pure core, and the shells over real sockets
	$(PY) -m pytest -q $(WORKERS) -m 'not netns and not interop and not hostile and not compiled and not kube'

nightly: $(STAMP) ## what a commit has no time for: every test with all examples, sizes and variants, and ten minutes of PINGs beside a server in Go
	EXAMPLES=all $(PY) -m pytest -q $(WORKERS)
	$(MAKE) keepalive

life: $(STAMP) ## the life of a connection: its table into docs/life.md, and every reachable cell of it walked in both front ends
	$(PY) -m deploy.life_page
	$(PY) -m pytest -q --forks 2 tests/life tests/ztunnel/proxy/dataplane/test_life_table.py

addons: $(STAMP) ## the five addons of examples/addons in the demo's mesh, each with a connection that shows it; make demo MODE=addons
	@$(PY) -m deploy.demo --mode addons

netns: $(STAMP) ## only the tests that make network namespaces
	$(PY) -m pytest -q $(WORKERS) -m netns

netpol: $(STAMP) ## Kubernetes' scenarios of NetworkPolicy as real connections, plain and in tunnels, one table
	$(PY) -m tests.netns.netpol_table

interop: $(STAMP) ## the table of Envoy cases, in both roles
	$(PY) -m tests.interop

envoy-diff: $(STAMP) ## accepted fields of Envoy's dialect, and the scenarios beside Envoy that set them
	$(PY) -m tests.interop.envoy_diff

hostile: $(STAMP) ## every attack with a bystander beside it, against ours and against Envoy
	$(PY) -m tests.hostile

kube: $(STAMP) ## etcd and kube-apiserver for test-kube, into ~/.cache; needs Go, some minutes once
	$(PY) -m tests.apiserver.build

istiod: kube ## istiod of Istio's main branch for test-kube, into ~/.cache; needs Go, ten minutes once
	$(PY) -m tests.istiod.build

test-kube: $(STAMP) ## only the tests against a real API server, and a real istiod
	$(PY) -m pytest -q -m kube

FUZZER := $(VENV)/fuzz/.installed
$(FUZZER): requirements/fuzz.lock $(STAMP)
	-$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes --upgrade --target $(VENV)/fuzz -r $<
	@mkdir -p $(@D) && touch $@

fuzz: $(FUZZER) ## every reader of foreign bytes, MINUTES=n each (1), TARGET=a,b for some
	PYTHONPATH=$(VENV)/fuzz $(PY) -m tests.fuzz --minutes $(or $(MINUTES),1) --target '$(TARGET)'

audit: $(STAMP) ## known vulnerabilities, SBOM, the wheel built twice
	$(PY) -m deploy.supply

mutants: $(STAMP) ## small faults in the modules that decide: does a test notice? COUNT=n each (20; 0: all, for a night)
	$(PY) -m tests.mutation --count $(or $(COUNT),20)

faults: $(STAMP) ## what breaks around a proxy, the slow part as well: some minutes
	FAULTS=1 $(PY) -m pytest -q tests/netns/test_istio_faults.py tests/netns/test_istio_exhaustion.py

ops: $(STAMP) ## an operator's questions to a mesh of two nodes, and the state that fails each check
	$(PY) -m pytest -q --forks 2 tests/ztunnel/ask tests/ztunnel/runtime/console tests/netns/test_istio_ops.py

ui: $(STAMP) ## the live page of both demos in headless Chromium, clicked through; pictures in .run/ui
	UI=1 $(PY) -m pytest -q -rs tests/ui

handover: $(STAMP) ## long connections of mixed kinds over replacements of proxies: CONNECTIONS=n (1000), REPLACEMENTS=n (10), OTHER=source tree of every other proxy, DIALECT=envoy, FAR=envoy, RIVAL=istio:PATH
	$(PY) -m tests.handover $(if $(DIALECT),--dialect $(DIALECT)) $(if $(FAR),--far $(FAR)) $(if $(RIVAL),--rival $(RIVAL)) --connections $(or $(CONNECTIONS),1000) --replacements $(or $(REPLACEMENTS),10) $(if $(OTHER),--other $(OTHER))

soak: $(STAMP) ## a mesh under load and constant change for MINUTES=n (30): what grows, what fails
	$(PY) -m tests.soak --minutes $(or $(MINUTES),30)

keepalive: $(STAMP) ## quiet connections to a server of grpc-go for MINUTES=n (10), nightly; needs Go
	$(PY) -m tests.keepalive --minutes $(or $(MINUTES),10)

bench: $(STAMP) ## our pair of proxies against a pair of Envoys, interleaved; then what a hand-over costs
	$(PY) -m bench.compare
	$(PY) -m bench.handover

bench-start: $(STAMP) ## from exec to the first connection served, in meshes of 10, 1,000 and 10,000 workloads; COUNT=n each
	$(PY) -m tests.soak.recovery $(if $(COUNT),--count $(COUNT))

bench-instructions: $(STAMP) ## what a new connection costs in instructions and calls, which other work on the machine does not change
	$(PY) -m bench.instructions

bench-idle: $(STAMP) ## what idle connections cost, and what is left when they are gone
	$(PY) -m bench.idle

bench-watched: $(STAMP) ## what the live page and a tap cost
	$(PY) -m bench.watched

bench-scale: $(STAMP) ## what 10, 1,000 and 20,000 services cost: start, memory, look-up, changes
	$(PY) -m bench.scale
	$(PY) -m bench.scale_istio
	$(PY) -m bench.scale_pods

bench-authz: $(STAMP) ## what Calico's policies cost: an evaluation, a change, a check through the server
	$(PY) -m bench.authz

bench-netpol: $(STAMP) ## what network policy in the kernel costs: packets, the start, one change, memory
	$(PY) -m bench.netpol

bench-enrol: $(STAMP) ## 250 pods enrolled in one go; 10,000 that come and go, and what is left: ten minutes
	$(PY) -m bench.enrol

bench-pushes: $(STAMP) ## 5,000 pushes a second, SotW and delta: no stream lost; then 1,000 changes of one endpoint beside Envoy
	$(PY) -m bench.pushes
	$(PY) -m bench.changes

compiled: $(STAMP) ## compile the tunnel engine and the steps of a connection in place with mypyc; needs a C compiler and Python's headers
	ZTUNNEL_COMPILE=1 $(PY) setup.py -q build_ext --inplace
	@$(PY) -c 'import hbone; print(hbone.build())'

wheels: $(STAMP) ## a pure wheel, and a compiled one for each python3.11 to 3.14 here, into dist
	$(PY) -m deploy.wheels

pure: ## back to pure Python
	find . -path ./$(VENV) -prune -o -name '*.so' -exec rm -f {} +
	rm -rf build

proto: $(STAMP) ## regenerate xds/proto from its .proto files
	$(PY) -m xds.proto.generate

bare: ## README's first hour in a root with only Python, git and make; needs root and debootstrap
	tests/bare.sh

helm: .tools/helm ## Helm for the tests of the chart; needs Go, some minutes once

.tools/helm:
	@$(NEEDS_GO)
	GOBIN=$(CURDIR)/.tools $(GO) install helm.sh/helm/v3/cmd/helm@v3.19.0

promtool: .tools/promtool ## Prometheus's checker for the tests of metrics pages; needs Go, some minutes once

.tools/promtool:
	@$(NEEDS_GO)
	@mkdir -p .tools && build=$$(mktemp -d) && cd $$build && $(GO) mod init promtool 2>/dev/null && \
	$(GO) get github.com/prometheus/prometheus/cmd/promtool@v0.55.1 && \
	$(GO) build -o $(CURDIR)/$@ github.com/prometheus/prometheus/cmd/promtool && rm -rf $$build

man: $(STAMP) ## manual pages of all commands, into dist/man1
	$(PY) -m deploy.manpages dist/man1

hubble: $(STAMP) .tools/hubble .tools/hubble-relay ## Hubble's own command and relay over the proxies of two nodes, with mTLS and without; needs Go, minutes once
	$(PY) -m pytest -q -rs tests/ztunnel/ask/flows/test_hubble.py tests/ztunnel/proxy/flows/test_observer.py tests/netns/test_istio_hubble.py

HUBBLE := github.com/cilium/cilium
.tools/hubble .tools/hubble-relay &:
	@$(NEEDS_GO)
	@mkdir -p .tools && build=$$(mktemp -d) && cd $$build && export CGO_ENABLED=0 GOFLAGS=-mod=mod && \
	$(GO) mod init hubble 2>/dev/null && $(GO) get $(HUBBLE)/hubble@v1.20.2 $(HUBBLE)/hubble-relay@v1.20.2 && \
	$(GO) build -trimpath -ldflags "-s -w -X $(HUBBLE)/hubble/pkg.Version=v1.20.2" -o $(CURDIR)/.tools/ $(HUBBLE)/hubble $(HUBBLE)/hubble-relay && \
	rm -rf $$build

lock: ## resolve requirements/*.lock anew
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet pip-tools
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --allow-unsafe --no-emit-find-links -o requirements/runtime.lock pyproject.toml
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --allow-unsafe --no-emit-find-links -o requirements/dev.lock pyproject.toml requirements/dev.in
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --no-emit-find-links -o requirements/cel.lock requirements/cel.in
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --no-emit-find-links -o requirements/otlp.lock requirements/otlp.in
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --allow-unsafe --no-emit-find-links -o requirements/compile.lock requirements/compile.in
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --no-emit-find-links -o requirements/fuzz.lock requirements/fuzz.in
	$(PY) -m piptools compile -q --generate-hashes --strip-extras --no-emit-find-links $(foreach name,grpcio protobuf typing-extensions,--unsafe-package $(name)) -o requirements/rivals.lock requirements/rivals.in

clean: ## everything the targets above made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .run build dist *.egg-info
	find . -name '*.so' -exec rm -f {} +
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
