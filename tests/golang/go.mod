module ztunnel.example/oracle

go 1.22

require (
	github.com/containernetworking/cni v1.2.3
	github.com/spf13/pflag v1.0.6
	sigs.k8s.io/yaml v1.4.0
)
