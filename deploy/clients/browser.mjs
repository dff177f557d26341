import * as ort from "onnxruntime-web/wasm";

const session = await ort.InferenceSession.create("best.onnx");
const photo = await (await fetch("photo.jpg")).blob();
const bitmap = await createImageBitmap(photo, { colorSpaceConversion: "none" }); // upright
const { width, height } = bitmap;
const context = new OffscreenCanvas(width, height).getContext("2d");
context.drawImage(bitmap, 0, 0);
const rgba = context.getImageData(0, 0, width, height).data;
const rgb = new Uint8Array(3 * width * height).map((_, i) => rgba[i + Math.floor(i / 3)]);
const output = await session.run({
  image: new ort.Tensor("uint8", rgb, [height, width, 3]),
  conf: new ort.Tensor("float32", [0.4], [1]),
  iou: new ort.Tensor("float32", [0.45], [1]),
  max_det: new ort.Tensor("int64", [300n], [1]),
});
output.scores.data.forEach((score, i) => {
  const box = Array.from(output.boxes.data.subarray(4 * i, 4 * i + 4), (side) => side.toFixed(1));
  console.log(`${output.classes.data[i]} ${score.toFixed(2)}: ${box.join(" ")}`);
});
