// Pause holds a pod's network namespace open until it is told to end.
package main

import "time"

func main() {
	for {
		time.Sleep(time.Hour)
	}
}
