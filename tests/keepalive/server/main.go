// A quiet gRPC server with grpc-go's own enforcement of keepalive: every method keeps its stream open. It prints a line
// when a connection begins and when one ends.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
)

type connections struct{}

func (connections) TagRPC(c context.Context, _ *stats.RPCTagInfo) context.Context   { return c }
func (connections) HandleRPC(context.Context, stats.RPCStats)                       {}
func (connections) TagConn(c context.Context, _ *stats.ConnTagInfo) context.Context { return c }
func (connections) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, begins := s.(*stats.ConnBegin); begins {
		fmt.Println("begins")
	} else {
		fmt.Println("ends")
	}
}

func main() {
	network := "tcp"
	if os.Args[1][0] == '/' {
		network = "unix"
	}
	listener, err := net.Listen(network, os.Args[1])
	if err != nil {
		panic(err)
	}
	quiet := func(_ any, stream grpc.ServerStream) error {
		<-stream.Context().Done()
		return nil
	}
	server := grpc.NewServer(grpc.StatsHandler(connections{}), grpc.UnknownServiceHandler(quiet))
	fmt.Println("serves")
	if err := server.Serve(listener); err != nil {
		panic(err)
	}
}
