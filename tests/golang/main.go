// Answers what Go's own readers make of values: one JSON request a line, one JSON answer a line.
package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

type request struct {
	Do        string   `json:"do"`
	Text      string   `json:"text"`
	Arguments []string `json:"arguments"`
	// Flags by name; the value is the kind: bool, string or duration. One-letter names are shorthands ("name,n").
	Flags map[string]string `json:"flags"`
}

type answer struct {
	Value any    `json:"value"`
	Error string `json:"error"`
}

func main() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(make([]byte, 1<<20), 1<<26)
	for in.Scan() {
		var asked request
		if err := json.Unmarshal(in.Bytes(), &asked); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		var found answer
		value, err := guarded(asked)
		if err != nil {
			found.Error = err.Error()
		} else {
			found.Value = value
		}
		line, err := json.Marshal(found)
		if err != nil {
			line, _ = json.Marshal(answer{Error: err.Error()})
		}
		fmt.Println(string(line))
	}
}

func guarded(asked request) (value any, err error) {
	defer func() {
		if fault := recover(); fault != nil {
			err = fmt.Errorf("panic: %v", fault)
		}
	}()
	switch asked.Do {
	case "yaml":
		text, err := yaml.YAMLToJSON([]byte(asked.Text))
		return json.RawMessage(text), err
	case "cidr":
		_, network, err := net.ParseCIDR(asked.Text)
		if err != nil {
			return nil, err
		}
		return network.String(), nil
	case "bool":
		return strconv.ParseBool(asked.Text)
	case "duration":
		found, err := time.ParseDuration(asked.Text)
		return found.Nanoseconds(), err
	case "flags":
		return flags(asked)
	case "probe":
		return probe(asked.Text)
	case "cni":
		return networks(asked.Text)
	}
	return nil, fmt.Errorf("unknown request %q", asked.Do)
}

func flags(asked request) (any, error) {
	set := pflag.NewFlagSet("oracle", pflag.ContinueOnError)
	set.SetOutput(bytes.NewBuffer(nil))
	for name, kind := range asked.Flags {
		short := ""
		if at := bytes.IndexByte([]byte(name), ','); at >= 0 {
			name, short = name[:at], name[at+1:]
		}
		switch kind {
		case "bool":
			set.BoolP(name, short, false, "")
		case "duration":
			set.DurationP(name, short, 0, "")
		default:
			set.StringP(name, short, "", "")
		}
	}
	if err := set.Parse(asked.Arguments); err != nil {
		return nil, err
	}
	given := map[string]string{}
	set.Visit(func(each *pflag.Flag) { given[each.Name] = each.Value.String() })
	return map[string]any{"given": given, "rest": set.Args()}, nil
}

// probe asks a URL as kubelet's prober does, and returns the status that it judges, 0 for a failure.
func probe(url string) (any, error) {
	client := &http.Client{
		Timeout: 3 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig:    &tls.Config{InsecureSkipVerify: true},
			DisableKeepAlives:  true,
			DisableCompression: true,
		},
		CheckRedirect: func(asked *http.Request, before []*http.Request) error {
			if asked.URL.Hostname() != before[0].URL.Hostname() {
				return http.ErrUseLastResponse
			}
			if len(before) >= 10 {
				return errors.New("stopped after 10 redirects")
			}
			return nil
		},
	}
	answer, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if _, err := io.ReadAll(io.LimitReader(answer.Body, 10*1024)); err != nil {
		return nil, err
	}
	return answer.StatusCode, nil
}

// networks returns the file that containerd and CRI-O take of a folder, the first by name that can be used.
func networks(folder string) (any, error) {
	files, err := libcni.ConfFiles(folder, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		var list *libcni.NetworkConfigList
		if len(file) > 9 && file[len(file)-9:] == ".conflist" {
			list, err = libcni.ConfListFromFile(file)
		} else {
			var one *libcni.NetworkConfig
			one, err = libcni.ConfFromFile(file)
			if err == nil && one.Network.Type == "" {
				err = fmt.Errorf("no type")
			}
			if err == nil {
				list, err = libcni.ConfListFromConf(one)
			}
		}
		if err != nil || len(list.Plugins) == 0 {
			continue
		}
		types := []string{}
		for _, each := range list.Plugins {
			types = append(types, each.Network.Type)
		}
		return map[string]any{"file": file, "plugins": types}, nil
	}
	return nil, nil
}
