// Command etcd is the etcd server. Go names the program of the package go.etcd.io/etcd/server/v3 "server".
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
