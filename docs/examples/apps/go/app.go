// Requests messages from the sidecar, processes each, and acknowledges or rejects it; run it with `go run app.go`.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"
)

type message struct {
	ID, Topic string
	Attempt   int
	Body      []byte `json:"bodyBase64"` // decoded by encoding/json
}

// process processes a message; after an error it is retried later.
func process(m message) error {
	_, err := fmt.Println(m.Topic, m.Attempt, string(m.Body))
	return err
}

// send sends a request and decodes the response; it reads all of it, so that the connection can be reused.
func send(method, path string, body map[string][]string, response any) error {
	sidecar := cmp.Or(os.Getenv("ROTA"), "127.0.0.1:9912")
	encoded, _ := json.Marshal(body)
	request, _ := http.NewRequest(method, "http://"+sidecar+path, bytes.NewReader(encoded))
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	return json.NewDecoder(answer.Body).Decode(response)
}

func main() {
	for {
		var pulled struct{ Messages []message }
		if err := send("GET", "/v1/messages?max=32&wait=10s", nil, &pulled); err != nil {
			log.Print(err) // the sidecar has not started yet, or was restarted
			time.Sleep(time.Second)
		}
		idsByPath := map[string][]string{}
		for _, m := range pulled.Messages {
			path := "/v1/acks"
			if process(m) != nil {
				path = "/v1/nacks"
			}
			idsByPath[path] = append(idsByPath[path], m.ID)
		}
		for path, ids := range idsByPath {
			send("POST", path, map[string][]string{"ids": ids}, &struct{ Unknown []string }{})
		}
	}
}
