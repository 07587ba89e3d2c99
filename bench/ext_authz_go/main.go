// A policy server that answers OK to every check, for bench/authz.py: what the transport allows in grpc-go.
//
// It decodes each request and encodes each answer, and judges nothing. Usage: ext-authz SOCKET
package main

import (
	"context"
	"log"
	"net"
	"os"

	auth "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	status "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
)

type server struct{}

func (server) Check(context.Context, *auth.CheckRequest) (*auth.CheckResponse, error) {
	return &auth.CheckResponse{Status: &status.Status{}}, nil
}

func main() {
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	serving := grpc.NewServer()
	auth.RegisterAuthorizationServer(serving, server{})
	log.Print("serving")
	log.Fatal(serving.Serve(listener))
}
