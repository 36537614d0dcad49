//! A model over several devices.

use crate::usage::{assert_refused, json, kvant};

#[test]
fn unusable_lists_of_devices_are_rejected_in_one_line() {
    let of_devices = |args: &[&str]| kvant(&[&["run", "-p", "x", "--device"], args].concat());
    assert_refused(&of_devices(&["cuda:0,cuda:0"]), 2, &["cuda:0,cuda:0", "each GPU once"]);
    assert_refused(&of_devices(&["cpu,auto"]), 2, &["auto alone"]);
    assert_refused(&of_devices(&["cpu,gpu"]), 2, &["cpu,gpu", "cuda:N"]);
    assert_refused(&of_devices(&["cpu,cuda:9999"]), 1, &["cuda: no "]);
    let many = ["cpu"; 99].join(",");
    assert_refused(&of_devices(&[&many]), 1, &["--device: expected a layer for each", "layers"]);
    assert_refused(&of_devices(&["cpu,cpu", "-ts", "1"]), 1, &["--tensor-split: expected 2 shares", "got 1"]);
    assert_refused(&of_devices(&["cpu,cpu", "-ts", "1,0"]), 2, &["--tensor-split", "above 0"]);
}

#[test]
fn two_cpu_devices_answer_as_one() {
    let answer = |args: &[&str]| {
        let question = ["run", "-p", "What is the capital of France?", "--temp", "0", "--json"];
        json(&kvant(&[&question, args].concat()))
    };
    let [one, two] = [&["--device", "cpu"][..], &["--device", "cpu,cpu", "-ts", "1,4"]].map(answer);
    assert_eq!(two["text"], one["text"]);
    assert!(two["text"].as_str().unwrap().contains("Paris"), "{two}");
    assert_eq!(two["device"], "cpu (1 layers) + cpu (4 layers)");
}
