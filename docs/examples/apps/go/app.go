// Asks the sidecar for messages, works each, and says which went well; run it with `go run app.go`.
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

// work does what there is to do; an error means: again, later.
func work(it message) error {
	_, err := fmt.Println(it.Topic, it.Attempt, string(it.Body))
	return err
}

// ask reads an answer to its end, so that the connection can be used again.
func ask(method, path string, told map[string][]string, found any) error {
	sidecar := cmp.Or(os.Getenv("ROTA"), "127.0.0.1:9912")
	body, _ := json.Marshal(told)
	request, _ := http.NewRequest(method, "http://"+sidecar+path, bytes.NewReader(body))
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	return json.NewDecoder(answer.Body).Decode(found)
}

func main() {
	for {
		var found struct{ Messages []message }
		if err := ask("GET", "/v1/messages?max=32&wait=10s", nil, &found); err != nil {
			log.Print(err) // the sidecar is not there yet
			time.Sleep(time.Second)
		}
		ids := map[string][]string{}
		for _, it := range found.Messages {
			where := "/v1/acks"
			if work(it) != nil {
				where = "/v1/nacks"
			}
			ids[where] = append(ids[where], it.ID)
		}
		for where, some := range ids {
			ask("POST", where, map[string][]string{"ids": some}, &struct{ Unknown []string }{})
		}
	}
}
