// Health prints how Flux (by kstatus) and Argo CD (by a script in Lua) judge objects of Kubernetes.
//
// Each line of the input is {"lua": "…", "object": {…}}, each line of the output {"kstatus": "…", "argo": {…}}.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type question struct {
	Lua    string          `json:"lua"`
	Object json.RawMessage `json:"object"`
}

type answer struct {
	Kstatus string            `json:"kstatus"`
	Argo    map[string]string `json:"argo"`
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		told, err := judge(lines.Bytes())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(told)
	}
}

func judge(line []byte) (string, error) {
	var asked question
	if err := json.Unmarshal(line, &asked); err != nil {
		return "", err
	}
	object := &unstructured.Unstructured{}
	if err := object.UnmarshalJSON(asked.Object); err != nil {
		return "", err
	}
	result, err := status.Compute(object)
	if err != nil {
		return "", err
	}
	told := answer{Kstatus: string(result.Status)}
	if told.Argo, err = argo(asked.Lua, object.Object); err != nil {
		return "", err
	}
	text, err := json.Marshal(told)
	return string(text), err
}

// argo runs a health check with the libraries that Argo CD gives it.
func argo(script string, object map[string]any) (map[string]string, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable,
	} {
		call := lua.P{Fn: state.NewFunction(open), NRet: 0, Protect: true}
		if err := state.CallByParam(call, lua.LString(name)); err != nil {
			return nil, err
		}
	}
	state.SetGlobal("obj", value(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	health, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("the script returns no table")
	}
	found := map[string]string{}
	health.ForEach(func(key, value lua.LValue) { found[key.String()] = value.String() })
	return found, nil
}

func value(state *lua.LState, from any) lua.LValue {
	switch from := from.(type) {
	case map[string]any:
		table := state.NewTable()
		for key, one := range from {
			table.RawSetString(key, value(state, one))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, one := range from {
			table.Append(value(state, one))
		}
		return table
	case string:
		return lua.LString(from)
	case bool:
		return lua.LBool(from)
	case int64:
		return lua.LNumber(from)
	case float64:
		return lua.LNumber(from)
	}
	return lua.LNil
}
